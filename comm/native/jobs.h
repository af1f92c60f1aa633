// What is to be copied, and the pieces in which threads do it.
#pragma once

#include <algorithm>
#include <list>

#include "post.h"

namespace loong {

// Copied by one thread at a time; between pieces other messages get their turn.
constexpr uint64_t PIECE_BYTES = 1 << 20;
// Jobs up to this are done by whoever finds them, larger ones are left to threads that have the time.
constexpr uint64_t SMALL_BYTES = 128 << 10;

// Bytes to move within the mapping, in pieces, by any threads.
struct Job {
    enum Kind { PULL, PUSH, DRAIN } kind;
    Op* op;
    unsigned char* source;
    unsigned char* target;
    uint64_t bytes;
    uint64_t position;
    uint64_t offset;
    // Handed out, and copied.
    uint64_t begun = 0, ended = 0;
};

struct Piece {
    Job* job;
    uint64_t begin, bytes;
};

// All under the engine's lock but for `any`.
class Jobs {
public:
    void add(const Job& job) {
        (job.bytes <= SMALL_BYTES ? small_ : large_).push_back(job);
        count();
    }

    // Whether there is a piece to take.
    bool any() const { return num_waiting_.load(std::memory_order_relaxed) != 0; }

    // Take the next piece: small jobs first, large ones in turns.
    bool take(Piece& piece, bool small_only) {
        std::list<Job>& queue = small_.empty() && !small_only ? large_ : small_;
        if (queue.empty()) return false;
        Job& job = queue.front();
        piece = {&job, job.begun, std::min(PIECE_BYTES, job.bytes - job.begun)};
        job.begun += piece.bytes;
        job.op->num_copies++;
        std::list<Job>& destination = job.begun < job.bytes ? queue : begun_;
        destination.splice(destination.end(), queue, queue.begin());
        count();
        return true;
    }

    void drop(const Job& job) {
        begun_.remove_if([&](const Job& other) { return &other == &job; });
    }

    // Hand out no more pieces of a peer's jobs. One that is being copied lives until that has ended.
    void drop_peer(uint32_t peer) {
        for (std::list<Job>* queue : {&small_, &large_}) {
            for (auto job = queue->begin(); job != queue->end();) {
                auto next = std::next(job);
                if (job->op->peer == peer) {
                    if (job->begun == job->ended) queue->erase(job);
                    else begun_.splice(begun_.end(), *queue, job);
                }
                job = next;
            }
        }
        count();
    }

private:
    void count() { num_waiting_.store(small_.size() + large_.size(), std::memory_order_relaxed); }

    // With pieces left, and those whose last piece is being copied.
    std::list<Job> small_, large_, begun_;
    std::atomic<uint64_t> num_waiting_{0};
};

}  // namespace loong
