// What was posted: an op is one send or receive, a post is the batch that one handle stands for.
#pragma once

#include <memory>
#include <vector>

#include "layout.h"

namespace loong {

enum Status : uint32_t { PENDING, FINISHED, LOST, CLOSED, MISMATCHED, TIMED_OUT, INTERRUPTED };
enum Reason : uint32_t { NONE, ENDED, PEER_CLOSED, PEER_ABORTED };

struct Post;

struct Op {
    Post* post = nullptr;
    bool is_send = false;
    uint32_t peer = 0;
    uint32_t channel = 0;
    uint32_t dtype = 0;
    unsigned char* data = nullptr;
    uint64_t bytes = 0;
    // Number in its lane.
    uint64_t number = 0;
    // Where it lies in the file. For a small send from elsewhere that is a copy in `copy_bytes` of the arena.
    uint64_t offset = NOWHERE;
    uint64_t copy_bytes = 0;
    // A receive that lies nowhere, of a message that lies nowhere: bytes asked for and bytes that have come.
    uint64_t asked_bytes = 0, come_bytes = 0;
    // Pieces of it that a thread is copying right now.
    uint32_t num_copies = 0;
    // It failed, but the peer may still write where it was told to: the tensor is kept.
    bool peer_may_write = false;
    bool over = false;
};

// Why a post failed.
struct Failure {
    uint32_t rank;
    uint32_t reason;
    uint32_t op;
    uint32_t dtype;
    uint64_t bytes;
};

struct Post {
    // A Status up to MISMATCHED; set once.
    Word status{PENDING};
    Failure failure{};
    std::vector<Op> ops;
    uint32_t num_pending = 0;
    // Ops whose tensors may still be read or written.
    Word num_held{0};
    // Threads that sleep on `status`.
    uint32_t num_followers = 0;
    // Itself, as long as ops are held.
    std::shared_ptr<Post> self;
};

}  // namespace loong
