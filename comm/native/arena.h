// The part of the file in which one rank makes its tensors: first fit, so that few pages are ever touched.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "layout.h"

namespace loong {

class Arena {
public:
    Arena(std::shared_ptr<World> world, uint32_t rank)
        : world_(std::move(world)), begin_(world_->arena(rank)), bytes_(world_->layout().arena_bytes) {
        free_[begin_] = bytes_;
    }

    // Offset of a new block in the file, or NOWHERE if none is large enough.
    uint64_t allocate(uint64_t bytes) {
        bytes = round_up(bytes, LINE_BYTES);
        std::lock_guard lock(mutex_);
        for (auto range = free_.begin(); range != free_.end(); ++range) {
            if (range->second < bytes) continue;
            uint64_t offset = range->first, rest = range->second - bytes;
            free_.erase(range);
            if (rest != 0) free_[offset + bytes] = rest;
            used_ += bytes;
            return offset;
        }
        return NOWHERE;
    }

    void release(uint64_t offset, uint64_t bytes) {
        bytes = round_up(bytes, LINE_BYTES);
        std::lock_guard lock(mutex_);
        used_ -= bytes;
        auto next = free_.lower_bound(offset);
        if (next != free_.end() && next->first == offset + bytes) {
            bytes += next->second;
            next = free_.erase(next);
        }
        if (next != free_.begin()) {
            auto before = std::prev(next);
            if (before->first + before->second == offset) {
                before->second += bytes;
                return;
            }
        }
        free_[offset] = bytes;
    }

    uint64_t used_bytes() {
        std::lock_guard lock(mutex_);
        return used_;
    }

    // Offset in the file of memory in this arena, else NOWHERE.
    uint64_t find(const void* data, uint64_t bytes) const {
        auto address = reinterpret_cast<uintptr_t>(data), begin = reinterpret_cast<uintptr_t>(world_->at(begin_));
        if (address < begin || address - begin > bytes_ || bytes > bytes_ - (address - begin)) return NOWHERE;
        return begin_ + (address - begin);
    }

    void* at(uint64_t offset) const { return world_->at(offset); }

private:
    const std::shared_ptr<World> world_;
    const uint64_t begin_, bytes_;
    std::mutex mutex_;
    // Offset -> bytes; no two ranges touch.
    std::map<uint64_t, uint64_t> free_;
    uint64_t used_ = 0;
};

}  // namespace loong
