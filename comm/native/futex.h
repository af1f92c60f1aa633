// Sleeping and waking on words in memory, the clock, and how a spinning thread rests.
#pragma once

#include <cerrno>
#include <climits>
#include <cstdint>
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

namespace loong {

using Word = std::atomic<uint32_t>;
static_assert(sizeof(Word) == 4 && Word::is_always_lock_free);

// No deadline.
constexpr int64_t FOREVER = INT64_MAX;

inline int64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return int64_t(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

// Sleep while `word` is `expected`; returns 0 (woken, or it was not), ETIMEDOUT or EINTR. May wake without a reason.
inline int futex_wait(Word& word, uint32_t expected, int64_t deadline_ns) {
    timespec time{time_t(deadline_ns / 1'000'000'000), long(deadline_ns % 1'000'000'000)};
    // The bitset form takes an absolute time.
    long result = syscall(SYS_futex, &word, FUTEX_WAIT_BITSET, expected, deadline_ns == FOREVER ? nullptr : &time,
                          nullptr, FUTEX_BITSET_MATCH_ANY);
    return result == -1 && (errno == ETIMEDOUT || errno == EINTR) ? errno : 0;
}

inline void futex_wake(Word& word, int threads = INT_MAX) {
    syscall(SYS_futex, &word, FUTEX_WAKE, threads, nullptr, nullptr, 0);
}

inline void rest() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace loong
