// The C interface of comm/shm.py.
#include <sys/stat.h>

#include "engine.h"

using namespace loong;

namespace {

// As dlpack.h defines them; torch takes over what this describes.
struct DlTensor {
    void* data;
    int32_t device_type, device_id;
    int32_t num_dims;
    uint8_t type_code, type_bits;
    uint16_t type_lanes;
    int64_t* shape;
    int64_t* strides;
    uint64_t byte_offset;
};
struct DlManagedTensor {
    DlTensor tensor;
    void* context;
    void (*deleter)(DlManagedTensor*);
};
constexpr int32_t DL_CPU = 1;
constexpr uint8_t DL_UNSIGNED = 1;

struct ArenaTensor {
    DlManagedTensor managed;
    int64_t bytes;
    uint64_t offset;
    std::shared_ptr<Arena> arena;
};

using Handle = std::shared_ptr<Post>;

}  // namespace

extern "C" {

struct LoongOp {
    uint64_t data, bytes;
    uint32_t peer, dtype, is_send, unused;
};

uint64_t loong_shm_total_bytes(uint32_t world_size, uint32_t channels, uint64_t arena_bytes) {
    return Layout{world_size, channels, arena_bytes}.total_bytes();
}

// Make a file of `loong_shm_total_bytes` a world. Answers 0 or an errno; also tries what ranks will need of the kernel.
int loong_shm_create(int file, uint32_t world_size, uint32_t channels, uint64_t arena_bytes) {
    int process = open_pidfd(uint32_t(getpid()));
    if (process < 0) return errno;
    close(process);
    void* page = mmap(nullptr, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (page == MAP_FAILED) return errno;
    auto* header = static_cast<Header*>(page);
    header->total_bytes = Layout{world_size, channels, arena_bytes}.total_bytes();
    header->arena_bytes = arena_bytes;
    header->world_size = world_size;
    header->channels = channels;
    header->magic.store(MAGIC);
    munmap(page, PAGE_BYTES);
    return 0;
}

// Read world_size and channels of a world; 0, or an errno: EINVAL if the file is none.
int loong_shm_read(int file, uint32_t* world_size, uint32_t* channels) {
    struct stat status;
    if (fstat(file, &status) != 0) return errno;
    if (uint64_t(status.st_size) < PAGE_BYTES) return EINVAL;
    void* page = mmap(nullptr, PAGE_BYTES, PROT_READ, MAP_SHARED, file, 0);
    if (page == MAP_FAILED) return errno;
    auto* header = static_cast<const Header*>(page);
    bool ours = header->magic.load() == MAGIC;
    *world_size = header->world_size;
    *channels = header->channels;
    munmap(page, PAGE_BYTES);
    return ours ? 0 : EINVAL;
}

// Map the world and take a rank in it; null with an errno in `error` (EBUSY: the rank is taken).
Engine* loong_shm_enter(int file, uint32_t rank, int64_t spin_ns, int* error) {
    void* page = mmap(nullptr, PAGE_BYTES, PROT_READ, MAP_SHARED, file, 0);
    if (page == MAP_FAILED) return *error = errno, nullptr;
    uint64_t bytes = static_cast<const Header*>(page)->total_bytes;
    munmap(page, PAGE_BYTES);
    void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (base == MAP_FAILED) return *error = errno, nullptr;
    auto* engine = new Engine(std::make_shared<World>(base, bytes), rank, spin_ns);
    if (!engine->enter()) {
        delete engine;
        return *error = EBUSY, nullptr;
    }
    return engine;
}

// 0: all ranks are there and the threads run. 1: not yet. 2: rank `lost` is gone.
int loong_shm_find_peers(Engine* engine, int64_t timeout_ns, uint32_t* lost) {
    int result = engine->find_peers(timeout_ns, *lost);
    if (result == 0) engine->start();
    return result;
}

Handle* loong_shm_post(Engine* engine, const LoongOp* ops, uint32_t num_ops, uint32_t channel) {
    auto post = std::make_shared<Post>();
    post->ops.resize(num_ops);
    for (uint32_t index = 0; index < num_ops; ++index) {
        const LoongOp& given = ops[index];
        Op& op = post->ops[index];
        op.post = post.get();
        op.is_send = given.is_send != 0;
        op.peer = given.peer;
        op.channel = channel;
        op.dtype = given.dtype;
        op.data = reinterpret_cast<unsigned char*>(given.data);
        op.bytes = given.bytes;
    }
    return engine->post(post) ? new Handle(std::move(post)) : nullptr;
}

uint32_t loong_shm_wait(Engine* engine, Handle* handle, int64_t timeout_ns) {
    return engine->wait(**handle, timeout_ns);
}

uint32_t loong_shm_look(Engine* engine, Handle* handle) { return engine->look(**handle); }

// Ops whose tensors may still be read or written.
uint32_t loong_shm_num_held(Handle* handle) { return (*handle)->num_held.load(); }

void loong_shm_failure(Handle* handle, Failure* failure) { *failure = (*handle)->failure; }

uint32_t loong_shm_is_over(Handle* handle, uint32_t op) { return (*handle)->ops[op].over ? 1 : 0; }

void loong_shm_release(Handle* handle) { delete handle; }

// A DLManagedTensor of `bytes` bytes, or null if the arena has no such block.
void* loong_shm_empty(Engine* engine, uint64_t bytes) {
    if (engine->closed()) return nullptr;
    uint64_t offset = engine->arena().allocate(bytes);
    if (offset == NOWHERE) return nullptr;
    auto* tensor = new ArenaTensor{{}, int64_t(bytes), offset, engine->shared_arena()};
    tensor->managed = {{engine->arena().at(offset), DL_CPU, 0, 1, DL_UNSIGNED, 8, 1, &tensor->bytes, nullptr, 0},
                       tensor,
                       [](DlManagedTensor* self) {
                           auto* owner = static_cast<ArenaTensor*>(self->context);
                           owner->arena->release(owner->offset, uint64_t(owner->bytes));
                           delete owner;
                       }};
    return &tensor->managed;
}

uint64_t loong_shm_used_bytes(Engine* engine) { return engine->arena().used_bytes(); }

void loong_shm_abort(Engine* engine) { engine->abort(); }

void loong_shm_close(Engine* engine) { engine->close(); }

void loong_shm_delete(Engine* engine) { delete engine; }

}  // extern "C"
