// How a message gets from one rank to another. Nothing here waits or copies; all is called under the engine's lock.
//
// The n-th send of a lane (peer, channel, direction) meets the n-th receive. The sender announces each message (SEND).
// Once the receive is posted too:
//
//     the message lies in the file         the receiver copies it from there              PULL, then DONE
//     only the receiver's tensor does      the sender copies it there                     GRANT; PUSH, then FILLED; DONE
//     neither does                         through staging slots, a few pieces at a time  GRANT; PUSH, then FILLED; DRAIN
//                                                                                         and GRANT again; at last DONE
//
// Reading from a peer that goes away is harmless: what was read counts only if the peer was still there after the copy.
// Writing to one is too: a receiver that gives up keeps such a tensor until it closes.
#pragma once

#include <deque>

#include "arena.h"
#include "jobs.h"

namespace loong {

class Protocol {
public:
    Protocol(std::shared_ptr<World> world, std::shared_ptr<Arena> arena, uint32_t rank)
        : world_(std::move(world)), arena_(std::move(arena)), rank_(rank), self_(world_->control(rank)),
          peers_(world_->layout().world_size) {
        for (Peer& peer : peers_) {
            peer.sends.resize(world_->layout().channels);
            peer.receives.resize(world_->layout().channels);
            for (uint32_t slot = 0; slot < STAGING_SLOTS; ++slot) peer.free_slots.push_back(slot);
        }
    }

    void start(Op& op) {
        Peer& peer = peers_[op.peer];
        if (peer.lost != NONE) return fail(op, {LOST, op.peer, peer.lost});
        if (op.is_send) {
            SendLane& lane = peer.sends[op.channel];
            op.number = lane.first + lane.ops.size();
            lane.ops.push_back(&op);
            tell(op.peer, {SEND, op.channel, op.number, op.bytes, op.offset, 0, op.dtype, 0});
        } else {
            ReceiveLane& lane = peer.receives[op.channel];
            op.number = lane.num_posted++;
            // Before the ring is looked at: a message that the sender need not wake us for is found there.
            world_->num_posted(op.peer, rank_, op.channel).store(lane.num_posted);
            Arrival& arrival = lane.at(op.number);
            arrival.op = &op;
            if (arrival.announced) match(arrival);
        }
    }

    // See to all that has come; false if nothing had.
    bool receive() {
        bool any = false;
        for (uint32_t rank = 0; rank < peers_.size(); ++rank) {
            if (rank == rank_ || peers_[rank].lost != NONE) continue;
            // Read first: what a peer sent before it went still counts.
            uint32_t state = world_->control(rank).state.load();
            any |= receive_from(rank);
            any |= flush(rank);
            if (state == CLOSED_DOWN || state == ABORTED) {
                lose(rank, state == CLOSED_DOWN ? PEER_CLOSED : PEER_ABORTED);
                any = true;
            }
        }
        return any;
    }

    // Whether `receive` or `take` would find something; needs no lock.
    bool anything() const {
        if (jobs_.any()) return true;
        for (uint32_t rank = 0; rank < peers_.size(); ++rank) {
            if (rank == rank_ || peers_[rank].gone.load(std::memory_order_relaxed)) continue;
            if (!world_->ring(rank, rank_).empty() || world_->control(rank).state.load() > PRESENT) return true;
        }
        return false;
    }

    // Take the next piece to copy.
    bool take(Piece& piece, bool small_only) { return jobs_.take(piece, small_only); }

    // A piece was copied.
    void finish(const Piece& piece) {
        Job& job = *piece.job;
        Op& op = *job.op;
        job.ended += piece.bytes;
        op.num_copies--;
        if (op.over) {
            // It failed meanwhile, and no more pieces are handed out.
            if (job.ended == job.begun) jobs_.drop(job);
            if (op.num_copies == 0) let_go(op);
            return;
        }
        if (job.ended < job.bytes) return;
        Job done = job;
        jobs_.drop(job);
        switch (done.kind) {
            case Job::PULL: {
                uint32_t state = world_->control(op.peer).state.load();
                if (state == PRESENT) accept(op);
                else lose(op.peer, state == CLOSED_DOWN ? PEER_CLOSED : PEER_ABORTED);
                break;
            }
            case Job::PUSH:
                tell(op.peer, {FILLED, op.channel, op.number, done.bytes, done.offset, done.position, 0, 0});
                break;
            case Job::DRAIN: {
                Peer& peer = peers_[op.peer];
                peer.free_slots.push_back(slot_of(op.peer, done.offset));
                op.come_bytes += done.bytes;
                if (op.come_bytes == op.bytes) accept(op);
                grant_slots(peer, op.peer);
            }
        }
    }

    void lose(uint32_t rank, Reason reason) {
        Peer& peer = peers_[rank];
        if (peer.lost != NONE) return;
        // A peer that ended may have told us much before.
        while (receive_from(rank)) continue;
        end_peer(rank, reason, {LOST, rank, reason});
    }

    // Fail everything. What is being copied is let go when that has ended.
    void end() {
        for (uint32_t rank = 0; rank < peers_.size(); ++rank) {
            if (peers_[rank].lost == NONE) end_peer(rank, ENDED, {CLOSED, rank_, NONE});
        }
    }

    // Let go what a lost peer could still write to; only once nobody will make tensors here any more.
    void let_go_kept() {
        for (Op* op : kept_) {
            op->peer_may_write = false;
            if (op->num_copies == 0) let_go(*op);
        }
        kept_.clear();
    }

    bool has_unsent() const {
        for (const Peer& peer : peers_) {
            if (!peer.unsent.empty()) return true;
        }
        return false;
    }

    void ring_all_bells() {
        for (uint32_t rank = 0; rank < peers_.size(); ++rank) {
            if (rank != rank_) ring_bell(rank);
        }
    }

    // Before a thread sleeps that may wait for a send: wake peers that could take one but do not look.
    void ring_for_sends() {
        for (uint32_t rank = 0; rank < peers_.size(); ++rank) {
            for (uint32_t channel = 0; channel < peers_[rank].sends.size(); ++channel) {
                const SendLane& lane = peers_[rank].sends[channel];
                if (!lane.ops.empty() && is_posted(rank, channel, lane.first)) ring_bell(rank);
            }
        }
    }

    // The handle's status changes; whoever waits for it is woken.
    void settle(Post& post, Status status) {
        post.status.store(status);
        if (post.num_followers != 0) futex_wake(post.status);
        if (&post == sleeping_leaders_post) {
            self_.leader_bell.fetch_add(1);
            futex_wake(self_.leader_bell);
        }
    }

    // What the leader waits for, while it sleeps on its bell.
    Post* sleeping_leaders_post = nullptr;

private:
    struct Arrival {
        Op* op = nullptr;
        bool announced = false;
        bool over = false;
        Message message{};
    };

    // Sends that were announced and are not done; nullptr for one that is, among older ones that are not.
    struct SendLane {
        uint64_t first = 0;
        std::deque<Op*> ops;
    };

    struct ReceiveLane {
        uint64_t first = 0;
        uint64_t num_posted = 0;
        std::deque<Arrival> arrivals;

        Arrival& at(uint64_t number) {
            while (arrivals.size() <= number - first) arrivals.emplace_back();
            return arrivals[number - first];
        }
    };

    struct Peer {
        Reason lost = NONE;
        // The same, to be read without the lock.
        std::atomic<bool> gone{false};
        std::vector<SendLane> sends;
        std::vector<ReceiveLane> receives;
        // What its ring had no space for.
        std::deque<Message> unsent;
        // Receives that still need slots, and the slots of this peer's messages to us that nobody uses.
        std::deque<Op*> in_want;
        std::deque<uint32_t> free_slots;
    };

    struct Outcome {
        Status status;
        uint32_t rank;
        Reason reason;
        uint32_t dtype = 0;
        uint64_t bytes = 0;
    };

    bool receive_from(uint32_t rank) {
        Ring& ring = world_->ring(rank, rank_);
        Message message;
        bool any = false;
        while (ring.pop(message)) {
            any = true;
            handle(rank, message);
        }
        if (any && ring.owes_wake()) ring_bell(rank);
        return any;
    }

    void handle(uint32_t rank, const Message& message) {
        Peer& peer = peers_[rank];
        SendLane& sends = peer.sends[message.channel];
        ReceiveLane& receives = peer.receives[message.channel];
        switch (message.kind) {
            case SEND: {
                Arrival& arrival = receives.at(message.number);
                arrival.announced = true;
                arrival.message = message;
                if (arrival.op != nullptr) match(arrival);
                break;
            }
            case FILLED: {
                Op& op = *receives.at(message.number).op;
                if (op.offset != NOWHERE) {
                    op.peer_may_write = false;
                    accept(op);
                } else {
                    jobs_.add({Job::DRAIN, &op, world_->at(message.offset), op.data + message.position, message.bytes,
                         message.position, message.offset});
                }
                break;
            }
            case GRANT: {
                Op& op = *sends.ops[message.number - sends.first];
                jobs_.add({Job::PUSH, &op, op.data + message.position, world_->at(message.offset), message.bytes,
                     message.position, message.offset});
                break;
            }
            case DONE:
            case MISMATCH: {
                Op& op = *sends.ops[message.number - sends.first];
                sends.ops[message.number - sends.first] = nullptr;
                while (!sends.ops.empty() && sends.ops.front() == nullptr) {
                    sends.ops.pop_front();
                    sends.first++;
                }
                if (message.kind == DONE) succeed(op);
                else fail(op, {MISMATCHED, rank, NONE, message.dtype, message.bytes});
            }
        }
    }

    void match(const Arrival& arrival) {
        Op& op = *arrival.op;
        const Message& message = arrival.message;
        if (message.bytes != op.bytes || message.dtype != op.dtype) {
            forget(op);
            tell(op.peer, {MISMATCH, op.channel, op.number, op.bytes, 0, 0, op.dtype, 0});
            fail(op, {MISMATCHED, op.peer, NONE, message.dtype, message.bytes});
        } else if (message.offset != NOWHERE) {
            jobs_.add({Job::PULL, &op, world_->at(message.offset), op.data, op.bytes, 0, message.offset});
        } else if (op.offset != NOWHERE) {
            op.peer_may_write = true;
            tell(op.peer, {GRANT, op.channel, op.number, op.bytes, op.offset, 0, 0, 0});
        } else {
            peers_[op.peer].in_want.push_back(&op);
            grant_slots(peers_[op.peer], op.peer);
        }
    }

    // Hand free slots out, one at a time to each receive that wants some.
    void grant_slots(Peer& peer, uint32_t rank) {
        while (!peer.in_want.empty() && !peer.free_slots.empty()) {
            Op& op = *peer.in_want.front();
            peer.in_want.pop_front();
            uint64_t offset = world_->staging(rank, rank_, peer.free_slots.front());
            peer.free_slots.pop_front();
            uint64_t bytes = std::min(STAGING_BYTES, op.bytes - op.asked_bytes);
            tell(rank, {GRANT, op.channel, op.number, bytes, offset, op.asked_bytes, 0, 0});
            op.asked_bytes += bytes;
            if (op.asked_bytes < op.bytes) peer.in_want.push_back(&op);
        }
    }

    uint32_t slot_of(uint32_t rank, uint64_t offset) const {
        return uint32_t((offset - world_->staging(rank, rank_, 0)) / STAGING_BYTES);
    }

    // All of a message has come.
    void accept(Op& op) {
        forget(op);
        tell(op.peer, {DONE, op.channel, op.number, 0, 0, 0, 0, 0});
        succeed(op);
    }

    void forget(const Op& op) {
        ReceiveLane& lane = peers_[op.peer].receives[op.channel];
        lane.at(op.number).over = true;
        while (!lane.arrivals.empty() && lane.arrivals.front().over) {
            lane.arrivals.pop_front();
            lane.first++;
        }
    }

    void succeed(Op& op) {
        Post& post = *op.post;
        op.over = true;
        if (--post.num_pending == 0 && post.status.load() == PENDING) settle(post, FINISHED);
        let_go(op);
    }

    void fail(Op& op, const Outcome& outcome) {
        Post& post = *op.post;
        op.over = true;
        if (post.status.load() == PENDING) {
            post.failure = {outcome.rank, outcome.reason, uint32_t(&op - post.ops.data()), outcome.dtype, outcome.bytes};
            settle(post, outcome.status);
        }
        if (op.peer_may_write) kept_.push_back(&op);
        else if (op.num_copies == 0) let_go(op);
    }

    // The op's tensor is not used any more. May end the post's life.
    void let_go(Op& op) {
        if (op.peer_may_write) return;
        if (op.copy_bytes != 0) arena_->release(op.offset, op.copy_bytes);
        op.copy_bytes = 0;
        if (op.post->num_held.fetch_sub(1) == 1) {
            std::shared_ptr<Post> last = std::move(op.post->self);
        }
    }

    void end_peer(uint32_t rank, Reason reason, const Outcome& outcome) {
        Peer& peer = peers_[rank];
        peer.lost = reason;
        peer.gone.store(true);
        jobs_.drop_peer(rank);
        for (SendLane& lane : peer.sends) {
            for (Op* op : lane.ops) {
                if (op != nullptr) fail(*op, outcome);
            }
            lane.ops.clear();
        }
        for (ReceiveLane& lane : peer.receives) {
            for (Arrival& arrival : lane.arrivals) {
                if (arrival.op != nullptr && !arrival.over) fail(*arrival.op, outcome);
            }
            lane.arrivals.clear();
        }
        peer.unsent.clear();
        peer.in_want.clear();
    }

    void tell(uint32_t rank, const Message& message) {
        Peer& peer = peers_[rank];
        if (peer.unsent.empty() && world_->ring(rank_, rank).push(message)) {
            if (must_wake(rank, message)) ring_bell(rank);
            return;
        }
        peer.unsent.push_back(message);
        flush(rank);
    }

    bool flush(uint32_t rank) {
        Peer& peer = peers_[rank];
        bool any = false, wake = false, asked = false;
        Ring& ring = world_->ring(rank_, rank);
        while (!peer.unsent.empty()) {
            if (ring.push(peer.unsent.front())) {
                wake |= must_wake(rank, peer.unsent.front());
                peer.unsent.pop_front();
                any = true;
            } else if (!asked) {
                ring.ask_for_space();
                asked = true;
            } else {
                // A full ring is reason enough to wake its reader.
                wake = true;
                break;
            }
        }
        if (wake) ring_bell(rank);
        return any;
    }

    // Waking a thread costs both sides more than a small message does. A peer that nobody waits at finds it when it
    // next looks; see `ring_for_sends` for the other end's patience.
    bool must_wake(uint32_t rank, const Message& message) const {
        bool waits = world_->control(rank).waiters.load() != 0;
        switch (message.kind) {
            case SEND: return (waits || message.bytes > SMALL_BYTES) && is_posted(rank, message.channel, message.number);
            case DONE:
            case MISMATCH: return waits;
            default: return true;
        }
    }

    bool is_posted(uint32_t rank, uint32_t channel, uint64_t number) const {
        return world_->num_posted(rank_, rank, channel).load() > number;
    }

    void ring_bell(uint32_t rank) {
        RankControl& control = world_->control(rank);
        if (control.door.load() == AWAKE) return;
        uint32_t door = control.door.exchange(AWAKE);
        if (door == AWAKE) return;
        Word& bell = door == ENGINE_ASLEEP ? control.engine_bell : control.leader_bell;
        bell.fetch_add(1);
        futex_wake(bell);
    }

    const std::shared_ptr<World> world_;
    const std::shared_ptr<Arena> arena_;
    const uint32_t rank_;
    RankControl& self_;
    std::vector<Peer> peers_;
    Jobs jobs_;
    std::vector<Op*> kept_;
};

}  // namespace loong
