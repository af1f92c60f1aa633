// What lies where in the memory file of a world, and the rings that ranks talk through.
//
//     header | a RankControl a rank | a pair block an ordered pair | staging slots an ordered pair | an arena a rank
//
// The file is as large as all that together, but a page is backed by memory only once somebody touches it. No rank
// ever holds a lock in here: all is written by one rank alone, or is an atomic word.
#pragma once

#include <cstring>

#include <sys/mman.h>

#include "futex.h"

namespace loong {

constexpr uint64_t MAGIC = 0x3173'6867'6e6f'6f6c;  // "loongsh1"
constexpr uint64_t LINE_BYTES = 64, PAGE_BYTES = 4096;
constexpr uint32_t RING_ENTRIES = 256;
constexpr uint32_t STAGING_SLOTS = 4;
constexpr uint64_t STAGING_BYTES = 256 << 10;
// An offset that is none: the tensor lies outside of the file.
constexpr uint64_t NOWHERE = 0;

constexpr uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

struct Header {
    std::atomic<uint64_t> magic;
    uint64_t total_bytes;
    uint64_t arena_bytes;
    uint32_t world_size;
    uint32_t channels;
};

enum RankState : uint32_t { ABSENT, PRESENT, CLOSED_DOWN, ABORTED };

// Who sees to what comes in, and so whom a sender must wake: nobody, as a thread is looking; the engine's thread; or the
// caller that leads (see engine.h).
enum Door : uint32_t { AWAKE, ENGINE_ASLEEP, LEADER_ASLEEP };

struct RankControl {
    alignas(LINE_BYTES) Word state;
    // Of its process, and so the claim to this rank; 0 while it is free.
    Word pid;
    // Of the process, in the kernel's unit: tells it from a later one of the same number.
    uint64_t start_time;
    alignas(LINE_BYTES) Word door;
    // Counted up by whoever wakes; what the two sleep on.
    Word engine_bell;
    Word leader_bell;
    // Threads that wait for a handle.
    Word waiters;
};

enum Kind : uint32_t {
    // Sender to receiver: message `number` of the channel is `bytes` long and lies at `offset`, or NOWHERE in the file.
    SEND = 1,
    // Receiver to sender, for a message that lies nowhere: copy `bytes` of it from `position` on to `offset`.
    GRANT,
    // Sender to receiver: that was done.
    FILLED,
    // Receiver to sender: all of the message has come.
    DONE,
    // Receiver to sender: it expected `bytes` of `dtype`.
    MISMATCH,
};

struct Message {
    Kind kind;
    uint32_t channel;
    uint64_t number;
    uint64_t bytes;
    uint64_t offset;
    uint64_t position;
    uint32_t dtype;
    uint32_t unused;
};
static_assert(sizeof(Message) <= LINE_BYTES);

// A FIFO of messages from one rank to another: one producer, one consumer, no locks.
class Ring {
public:
    // Producer. False if it is full.
    bool push(const Message& message) {
        uint64_t tail = tail_.load(std::memory_order_relaxed);
        if (tail - head_.load() >= RING_ENTRIES) return false;
        std::memcpy(entries_[tail % RING_ENTRIES], &message, sizeof(Message));
        tail_.store(tail + 1);
        return true;
    }

    // Producer: ask to be woken when there is space. The ring must be tried once more after this.
    void ask_for_space() { starved_.store(1); }

    // Consumer.
    bool pop(Message& message) {
        uint64_t head = head_.load(std::memory_order_relaxed);
        if (head == tail_.load()) return false;
        std::memcpy(&message, entries_[head % RING_ENTRIES], sizeof(Message));
        head_.store(head + 1);
        return true;
    }

    // Consumer, after a pop: whether the producer asked to be woken.
    bool owes_wake() { return starved_.load() != 0 && starved_.exchange(0) != 0; }

    // Consumer.
    bool empty() const { return head_.load(std::memory_order_relaxed) == tail_.load(); }

private:
    alignas(LINE_BYTES) std::atomic<uint64_t> tail_;
    alignas(LINE_BYTES) std::atomic<uint64_t> head_;
    alignas(LINE_BYTES) Word starved_;
    alignas(LINE_BYTES) unsigned char entries_[RING_ENTRIES][LINE_BYTES];
};

struct Layout {
    uint32_t world_size;
    uint32_t channels;
    uint64_t arena_bytes;

    uint64_t pair(uint32_t source, uint32_t destination) const { return uint64_t(source) * world_size + destination; }
    uint64_t num_pairs() const { return uint64_t(world_size) * world_size; }
    uint64_t pair_bytes() const { return round_up(sizeof(Ring) + channels * sizeof(uint64_t), PAGE_BYTES); }
    uint64_t controls() const { return PAGE_BYTES; }
    uint64_t pairs() const { return controls() + round_up(world_size * sizeof(RankControl), PAGE_BYTES); }
    uint64_t staging() const { return pairs() + num_pairs() * pair_bytes(); }
    uint64_t arenas() const { return staging() + num_pairs() * STAGING_SLOTS * STAGING_BYTES; }
    uint64_t total_bytes() const { return arenas() + world_size * arena_bytes; }
};

// The file, mapped into this process; unmapped when the last tensor in it is gone too.
class World {
public:
    World(void* base, uint64_t bytes)
        : base_(static_cast<unsigned char*>(base)), bytes_(bytes),
          layout_{header().world_size, header().channels, header().arena_bytes} {}
    ~World() { munmap(base_, bytes_); }
    World(const World&) = delete;
    World& operator=(const World&) = delete;

    const Layout& layout() const { return layout_; }
    unsigned char* at(uint64_t offset) const { return base_ + offset; }
    RankControl& control(uint32_t rank) const {
        return *reinterpret_cast<RankControl*>(at(layout_.controls() + rank * sizeof(RankControl)));
    }
    Ring& ring(uint32_t source, uint32_t destination) const {
        return *reinterpret_cast<Ring*>(at(layout_.pairs() + layout_.pair(source, destination) * layout_.pair_bytes()));
    }
    // How many receives the destination has posted: a message beyond them need not wake it.
    std::atomic<uint64_t>& num_posted(uint32_t source, uint32_t destination, uint32_t channel) const {
        return reinterpret_cast<std::atomic<uint64_t>*>(&ring(source, destination) + 1)[channel];
    }
    uint64_t staging(uint32_t source, uint32_t destination, uint32_t slot) const {
        return layout_.staging() + (layout_.pair(source, destination) * STAGING_SLOTS + slot) * STAGING_BYTES;
    }
    uint64_t arena(uint32_t rank) const { return layout_.arenas() + rank * layout_.arena_bytes; }

private:
    const Header& header() const { return *reinterpret_cast<const Header*>(base_); }

    unsigned char* const base_;
    const uint64_t bytes_;
    const Layout layout_;
};

}  // namespace loong
