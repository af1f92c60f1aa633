// The processes behind the ranks: who they are, and when they end.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "layout.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace loong {

inline int open_pidfd(uint32_t pid) { return int(syscall(SYS_pidfd_open, pid, 0)); }

// When a process started, in the kernel's unit; 0 if there is no such process. Field 22 of its stat, which is the 20th
// after its name; the name may hold anything but ends with the last parenthesis.
inline uint64_t read_start_time(uint32_t pid) {
    char path[32], text[1024];
    std::snprintf(path, sizeof path, "/proc/%u/stat", pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    if (length <= 0) return 0;
    text[length] = 0;
    const char* field = std::strrchr(text, ')');
    for (int skip = 0; field != nullptr && skip < 20; ++skip) field = std::strchr(field + 1, ' ');
    return field == nullptr ? 0 : std::strtoull(field + 1, nullptr, 10);
}

// A pidfd of every other rank's process.
class Peers {
public:
    Peers(std::shared_ptr<World> world, uint32_t rank)
        : world_(std::move(world)), rank_(rank), stop_(eventfd(0, EFD_CLOEXEC)) {
        watched_.resize(world_->layout().world_size + 1, {-1, POLLIN, 0});
        watched_.back().fd = stop_;
    }
    ~Peers() {
        for (pollfd& each : watched_) {
            if (each.fd >= 0) close(each.fd);
        }
    }
    Peers(const Peers&) = delete;
    Peers& operator=(const Peers&) = delete;

    // Wait until all ranks are there: 0 when they are, 1 at the deadline, 2 if `lost` is gone again.
    int find(int64_t deadline_ns, uint32_t& lost) {
        for (long sleep_ns = 100'000;; sleep_ns = std::min(sleep_ns * 2, 5'000'000L)) {
            bool all = true;
            for (uint32_t rank = 0; rank < world_->layout().world_size; ++rank) {
                if (rank == rank_) continue;
                uint32_t state = world_->control(rank).state.load();
                lost = rank;
                if (state > PRESENT || !is_alive(rank, state == PRESENT)) return 2;
                if (state < PRESENT) all = false;
            }
            if (all) return 0;
            if (now_ns() >= deadline_ns) return 1;
            timespec pause{0, sleep_ns};
            nanosleep(&pause, nullptr);
        }
    }

    // Call `ended` with each rank whose process ends, until `stop`.
    template <class Ended>
    void watch(const Ended& ended) {
        while (true) {
            if (poll(watched_.data(), watched_.size(), -1) < 0) continue;
            if (watched_.back().revents != 0) return;
            for (uint32_t rank = 0; rank + 1 < watched_.size(); ++rank) {
                if (watched_[rank].fd < 0 || watched_[rank].revents == 0) continue;
                close(watched_[rank].fd);
                watched_[rank].fd = -1;
                ended(rank);
            }
        }
    }

    void stop() { eventfd_write(stop_, 1); }

private:
    // False if the process that claimed a rank has ended. Its number may even be another's by now: a rank that is
    // `present` has also said when its process started.
    bool is_alive(uint32_t rank, bool present) {
        const RankControl& control = world_->control(rank);
        uint32_t pid = control.pid.load();
        if (pid == 0) return true;
        pollfd& process = watched_[rank];
        if (process.fd < 0) process.fd = open_pidfd(pid);
        if (process.fd < 0 || poll(&process, 1, 0) > 0) return false;
        return !present || read_start_time(pid) == control.start_time;
    }

    const std::shared_ptr<World> world_;
    const uint32_t rank_;
    const int stop_;
    // By rank; last the wish to stop.
    std::vector<pollfd> watched_;
};

}  // namespace loong
