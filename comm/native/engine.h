// One rank's threads, and how callers post and wait.
//
// Whoever has the time does the work, under one lock of this process that is let go while bytes are copied:
//
// - The caller that waits first is the leader: it looks for messages itself, for a while without sleeping if there are
//   cores enough, then asleep on its bell. That saves a change of threads for each message. Others that wait meanwhile
//   sleep until their handle is settled.
// - The engine's thread sleeps on a bell of its own and serves when nobody leads: so large transfers go on while callers
//   compute. For a small one it is woken only if somebody at the other end would otherwise sleep.
// - A post and a look at a handle also see to what has come, but copy only a little.
//
// The shared word `door` says whom a sender must wake. It is set before a thread looks for the last time and sleeps, and
// a sender reads it after its message is in the ring, so that one of the two sees the other.
#pragma once

#include <condition_variable>
#include <csignal>
#include <thread>

#include "peers.h"
#include "protocol.h"

namespace loong {

// Sends up to this of tensors outside of the file are copied into it by `post`.
constexpr uint64_t EAGER_BYTES = SMALL_BYTES;
// What a post copies at most for messages that have come.
constexpr uint64_t POST_BYTES = 2 * SMALL_BYTES;
// A wait for large messages spins longer, by the time in which they are copied at this speed, within a limit.
constexpr uint64_t BYTES_PER_NS = 8;
constexpr int64_t MAX_COPY_SPIN_NS = 200'000;
// How long `close` tries to tell busy peers what it still owes them.
constexpr int64_t FLUSH_NS = 1'000'000'000;

class Engine {
public:
    Engine(std::shared_ptr<World> world, uint32_t rank, int64_t spin_ns)
        : world_(world), arena_(std::make_shared<Arena>(world, rank)), self_(world->control(rank)), spin_ns_(spin_ns),
          peers_(world, rank), protocol_(world, arena_, rank) {}

    ~Engine() { close(); }

    // Take this rank's place; false if somebody had it before.
    bool enter() {
        uint32_t nobody = 0, pid = uint32_t(getpid());
        if (!self_.pid.compare_exchange_strong(nobody, pid)) return false;
        entered_ = true;
        self_.start_time = read_start_time(pid);
        self_.state.store(PRESENT);
        return true;
    }

    int find_peers(int64_t timeout_ns, uint32_t& lost) { return peers_.find(now_ns() + timeout_ns, lost); }

    void start() {
        // Signals are for the program's own threads.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        engine_ = std::thread([this] { serve(); });
        watcher_ = std::thread([this] {
            peers_.watch([this](uint32_t rank) {
                std::lock_guard lock(mutex_);
                if (!closed_) protocol_.lose(rank, ENDED);
            });
        });
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    Arena& arena() { return *arena_; }
    std::shared_ptr<Arena> shared_arena() { return arena_; }
    bool closed() const { return closed_; }

    // False if this end is closed.
    bool post(const std::shared_ptr<Post>& post) {
        for (Op& op : post->ops) {
            op.offset = arena_->find(op.data, op.bytes);
            if (op.offset != NOWHERE || !op.is_send || op.bytes > EAGER_BYTES) continue;
            op.offset = arena_->allocate(op.bytes);
            if (op.offset == NOWHERE) continue;
            op.copy_bytes = op.bytes;
            std::memcpy(arena_->at(op.offset), op.data, op.bytes);
        }
        std::unique_lock lock(mutex_);
        if (closed_) {
            for (Op& op : post->ops) {
                if (op.copy_bytes != 0) arena_->release(op.offset, op.copy_bytes);
            }
            return false;
        }
        post->num_pending = uint32_t(post->ops.size());
        post->num_held.store(post->num_pending);
        if (post->ops.empty()) post->status.store(FINISHED);
        else post->self = post;
        for (Op& op : post->ops) protocol_.start(op);
        do_little(lock);
        return true;
    }

    uint32_t look(Post& post) {
        if (post.status.load() == PENDING) {
            std::unique_lock lock(mutex_);
            do_little(lock);
            if (post.status.load() == PENDING) protocol_.ring_for_sends();
        }
        return post.status.load();
    }

    uint32_t wait(Post& post, int64_t timeout_ns) {
        uint32_t status = post.status.load();
        if (status != PENDING) return status;
        int64_t deadline_ns = timeout_ns == FOREVER ? FOREVER : now_ns() + timeout_ns;
        self_.waiters.fetch_add(1);
        std::unique_lock lock(mutex_);
        status = leader_ ? follow(post, deadline_ns, lock) : lead(post, deadline_ns, lock);
        self_.waiters.fetch_sub(1);
        return status;
    }

    void abort() {
        std::lock_guard lock(mutex_);
        end(ABORTED);
    }

    void close() {
        std::lock_guard closing(close_mutex_);
        {
            std::unique_lock lock(mutex_);
            flush(lock);
            end(CLOSED_DOWN);
            stop_ = true;
            wake_engine();
            // Callers that wait may still be copying.
            no_copies_.wait(lock, [this] { return num_copies_ == 0; });
        }
        peers_.stop();
        if (engine_.joinable()) engine_.join();
        if (watcher_.joinable()) watcher_.join();
        std::lock_guard lock(mutex_);
        protocol_.let_go_kept();
    }

private:
    // See to what has come and copy at most one piece; false if there was nothing to do.
    bool step(std::unique_lock<std::mutex>& lock, uint64_t* small_budget = nullptr) {
        if (closed_) return false;
        bool any = protocol_.receive();
        Piece piece;
        if (small_budget != nullptr && *small_budget < SMALL_BYTES) return false;
        if (!protocol_.take(piece, small_budget != nullptr)) return any;
        if (small_budget != nullptr) *small_budget -= piece.bytes;
        num_copies_++;
        lock.unlock();
        std::memcpy(piece.job->target + piece.begin, piece.job->source + piece.begin, piece.bytes);
        lock.lock();
        protocol_.finish(piece);
        if (--num_copies_ == 0 && closed_) no_copies_.notify_all();
        return true;
    }

    // What a caller can do that has something else to do.
    void do_little(std::unique_lock<std::mutex>& lock) {
        uint64_t budget = POST_BYTES;
        while (step(lock, &budget)) continue;
        if (protocol_.anything()) wake_engine();
    }

    uint32_t lead(Post& post, int64_t deadline_ns, std::unique_lock<std::mutex>& lock) {
        leader_ = true;
        self_.door.store(AWAKE);
        uint32_t outcome = PENDING;
        uint64_t bytes = 0;
        for (const Op& op : post.ops) bytes += op.bytes;
        const int64_t spin_ns = spin_ns_ == 0 ? 0 : spin_ns_ + std::min(int64_t(bytes / BYTES_PER_NS), MAX_COPY_SPIN_NS);
        int64_t spin_until = spin_ns == 0 ? 0 : now_ns() + spin_ns;
        while (post.status.load() == PENDING && outcome == PENDING) {
            if (step(lock)) {
                if (spin_ns != 0) spin_until = now_ns() + spin_ns;
                continue;
            }
            if (spin_ns != 0 && now_ns() < std::min(spin_until, deadline_ns)) {
                lock.unlock();
                for (int round = 0; round < 64 && post.status.load() == PENDING && !protocol_.anything(); ++round) rest();
                lock.lock();
                continue;
            }
            uint32_t bell = self_.leader_bell.load();
            self_.door.store(LEADER_ASLEEP);
            if (!step(lock) && post.status.load() == PENDING) {
                protocol_.ring_for_sends();
                protocol_.sleeping_leaders_post = &post;
                lock.unlock();
                int error = futex_wait(self_.leader_bell, bell, deadline_ns);
                lock.lock();
                protocol_.sleeping_leaders_post = nullptr;
                if (error == EINTR) outcome = INTERRUPTED;
                else if (error == ETIMEDOUT) outcome = TIMED_OUT;
            }
            self_.door.store(AWAKE);
        }
        leader_ = false;
        self_.door.store(ENGINE_ASLEEP);
        if (protocol_.anything()) wake_engine();
        return post.status.load() != PENDING ? post.status.load() : outcome;
    }

    uint32_t follow(Post& post, int64_t deadline_ns, std::unique_lock<std::mutex>& lock) {
        post.num_followers++;
        protocol_.ring_for_sends();
        int error = 0;
        while (post.status.load() == PENDING && error == 0) {
            lock.unlock();
            error = futex_wait(post.status, PENDING, deadline_ns);
            lock.lock();
        }
        post.num_followers--;
        if (post.status.load() != PENDING) return post.status.load();
        return error == EINTR ? INTERRUPTED : TIMED_OUT;
    }

    void serve() {
        std::unique_lock lock(mutex_);
        while (!stop_) {
            if (step(lock)) continue;
            uint32_t bell = self_.engine_bell.load();
            if (!leader_) self_.door.store(ENGINE_ASLEEP);
            if (step(lock) || stop_) continue;
            engine_asleep_ = true;
            lock.unlock();
            futex_wait(self_.engine_bell, bell, FOREVER);
            lock.lock();
            engine_asleep_ = false;
        }
    }

    void wake_engine() {
        if (!engine_asleep_) return;
        engine_asleep_ = false;
        self_.engine_bell.fetch_add(1);
        futex_wake(self_.engine_bell);
    }

    // Give peers that have not read what we told them a chance to: it may be what they wait for.
    void flush(std::unique_lock<std::mutex>& lock) {
        int64_t deadline_ns = now_ns() + FLUSH_NS;
        while (!closed_ && protocol_.has_unsent() && now_ns() < deadline_ns) {
            protocol_.receive();
            lock.unlock();
            timespec pause{0, 200'000};
            nanosleep(&pause, nullptr);
            lock.lock();
        }
    }

    void end(RankState how) {
        if (closed_) return;
        closed_ = true;
        // First: whoever read what our tensors become after this must know it.
        if (entered_) self_.state.store(how);
        protocol_.end();
        protocol_.ring_all_bells();
    }

    const std::shared_ptr<World> world_;
    const std::shared_ptr<Arena> arena_;
    RankControl& self_;
    const int64_t spin_ns_;
    Peers peers_;
    Protocol protocol_;
    std::mutex mutex_, close_mutex_;
    std::condition_variable no_copies_;
    std::thread engine_, watcher_;
    uint32_t num_copies_ = 0;
    bool entered_ = false, leader_ = false, engine_asleep_ = false, stop_ = false;
    std::atomic<bool> closed_{false};
};

}  // namespace loong
