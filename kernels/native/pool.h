// Threads that share out numbered pieces of work, and none where one thread is asked for.
#pragma once

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace loong {

class Pool {
public:
    // Run work(item, worker) for every item in 0..items-1 on up to `threads` threads, the caller among them; pieces are
    // taken in order. A caller that finds the pool in use by another one works alone.
    void run(int64_t items, int64_t threads, const std::function<void(int64_t, int64_t)>& work) {
        if (threads > items) threads = items;
        std::unique_lock<std::mutex> in_use(in_use_, std::defer_lock);
        if (threads <= 1 || !in_use.try_lock()) {
            for (int64_t item = 0; item < items; ++item) work(item, 0);
            return;
        }
        while (static_cast<int64_t>(workers_.size()) < threads - 1) {
            int64_t number = static_cast<int64_t>(workers_.size()) + 1;
            uint64_t seen = round_.load();
            workers_.emplace_back([this, number, seen] { serve(number, seen); });
        }
        {
            std::lock_guard<std::mutex> lock(mutex_);
            work_ = &work, items_ = items, wanted_ = threads - 1;
            next_.store(0), running_.store(static_cast<int64_t>(workers_.size()));
            round_.fetch_add(1);
        }
        wake_.notify_all();
        take(0);
        for (int spins = 0; running_.load(std::memory_order_acquire) != 0; ++spins) {
            if (spins < SPINS) pause();
            else std::this_thread::yield();
        }
    }

private:
    // About 10 us: longer than a pause between two phases of one call, shorter than a sleep.
    static constexpr int SPINS = 400;

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    void take(int64_t worker) {
        for (int64_t item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < items_;) (*work_)(item, worker);
    }

    void serve(int64_t number, uint64_t seen) {
        for (;;) {
            for (int spins = 0; spins < SPINS && round_.load(std::memory_order_acquire) == seen; ++spins) pause();
            if (round_.load(std::memory_order_acquire) == seen) {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return round_.load() != seen; });
            }
            seen = round_.load(std::memory_order_acquire);
            if (number <= wanted_) take(number);
            running_.fetch_sub(1, std::memory_order_release);
        }
    }

    std::mutex in_use_, mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
    std::atomic<uint64_t> round_{0};
    std::atomic<int64_t> next_{0}, running_{0};
    const std::function<void(int64_t, int64_t)>* work_ = nullptr;
    int64_t items_ = 0, wanted_ = 0;
};

// The process's pool, never destroyed: its threads may not be joined at exit. A forked child has none of the threads,
// and starts anew.
inline Pool& pool() {
    static std::atomic<Pool*> instance{nullptr};
    static std::once_flag once;
    std::call_once(once, [] {
        instance.store(new Pool);
        pthread_atfork(nullptr, nullptr, [] { instance.store(new Pool); });
    });
    return *instance.load();
}

}  // namespace loong
