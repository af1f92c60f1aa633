/* A stand-in for libnccl.so.2 on CPU memory, so that the real bindings run their real call sequence without a GPU.
 *
 * It keeps NCCL's rules, and is stricter where NCCL may be lenient:
 * - The ops of a group proceed together; groups of a stream run one after another. Messages of a pair are a FIFO.
 * - A send is done only when it was received whole: nothing is buffered, so a wrong order of posts is a deadlock.
 * - A send to oneself without its receive in the same group is refused. Sizes that differ are ncclInvalidUsage.
 * - A non-blocking communicator is in progress after init and after each group; a call meanwhile, or two calls at once
 *   from two threads, is refused and counted as a violation.
 * - A dead peer is not noticed, as over NVLink: the group hangs until abort. With notice_death it is ncclRemoteError,
 *   as over a network.
 *
 * Streams are threads with a queue, events are counters; the functions named standin_ drive them. Faults are set by the
 * environment, NCCL_STANDIN="name=value,...", or by standin_set: see knob_names.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS, CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS };

/* Times in microseconds; groups are counted from 1 for each communicator, 0 is never. */
enum { INIT_US, LAUNCH_US, DELAY_US, CALL_US, SEED, FAIL_GROUP, FAIL_CODE, HANG_GROUP, NOTICE_DEATH, FINALIZE_HANGS, NUM_KNOBS };
static const char *const knob_names[NUM_KNOBS] = {"init_us",   "launch_us",  "delay_us",   "call_us",      "seed",
                                                  "fail_group", "fail_code", "hang_group", "notice_death", "finalize_hangs"};
static atomic_long knobs[NUM_KNOBS] = {2000, 200, 0, 0, 0, 0, INTERNAL_ERROR, 0, 0, 0};
static atomic_int num_violations;

typedef struct { char internal[128]; } unique_id;
typedef struct { size_t size; unsigned magic, version; int blocking; } config;

#define COMM_MAGIC 0x10c0ffee

typedef struct comm {
  atomic_uint magic;
  int rank, size;
  bool blocking;
  unique_id id;
  atomic_int state, aborted, busy;
  atomic_int pending;   /* groups begun and not run yet, and threads at work */
  int num_groups;
  int listener, *out, *in; /* sockets by peer: out carries our data and their acknowledgements, in the reverse */
  char last_error[256];
} comm;

typedef enum { SEND, RECV, SUM } op_kind;
typedef struct {
  op_kind kind;
  comm *comm;
  struct stream *stream;
  char *data;
  size_t bytes, count;
  int peer, dtype;
  /* while it runs */
  int phase, previous;
  size_t moved;
  uint64_t header, start_us;
} op;

typedef struct {
  comm *comm;
  int num_ops;
  op *ops;
  /* of a sum: what came from each rank, and where the result goes */
  char **parts, *result;
  size_t count;
  int dtype;
} group;

typedef struct event { pthread_mutex_t lock; pthread_cond_t changed; long recorded, done; } event;

typedef enum { GROUP, RECORD, WAIT, SLEEP, COPY } item_kind;
typedef struct item {
  item_kind kind;
  group *group;
  event *event;
  long number;
  void *target;
  const void *source;
  struct item *next;
} item;

typedef struct stream { pthread_mutex_t lock; pthread_cond_t changed; item *first, **last; bool ended; } stream;

static uint64_t now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

static void *allocate(size_t size) {
  void *memory = calloc(1, size ? size : 1);
  if (!memory) abort();
  return memory;
}

static void start_thread(void *(*run)(void *), void *argument) {
  pthread_t thread;
  if (pthread_create(&thread, NULL, run, argument)) abort();
  pthread_detach(thread);
}

int standin_set(const char *name, long value) {
  for (int k = 0; k < NUM_KNOBS; k++)
    if (!strcmp(name, knob_names[k])) {
      knobs[k] = value;
      return 0;
    }
  return -1;
}

int standin_violations(void) { return num_violations; }

__attribute__((constructor)) static void read_environment(void) {
  const char *text = getenv("NCCL_STANDIN");
  char name[64];
  long value;
  int used;
  while (text && sscanf(text, "%63[^=]=%ld%n", name, &value, &used) == 2) {
    if (standin_set(name, value)) {
      fprintf(stderr, "NCCL_STANDIN: there is no knob %s\n", name);
      abort();
    }
    text += used;
    text = *text == ',' ? text + 1 : NULL;
  }
}

/* ---- errors and the rules of calls ---- */

static int set_error(comm *c, int code, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(c->last_error, sizeof c->last_error, format, arguments);
  va_end(arguments);
  atomic_store(&c->state, code);
  return code;
}

static int violate(comm *c, const char *what) {
  atomic_fetch_add(&num_violations, 1);
  fprintf(stderr, "NCCL stand-in: %s\n", what);
  snprintf(c->last_error, sizeof c->last_error, "%s", what);
  return INVALID_USAGE;
}

static int enter(comm *c, bool may_be_in_progress) {
  if (!c || c->magic != COMM_MAGIC) return INVALID_ARGUMENT;
  if (atomic_exchange(&c->busy, 1)) return violate(c, "two threads call one communicator at once");
  if (knobs[CALL_US]) usleep((useconds_t)knobs[CALL_US]);
  if (!may_be_in_progress && c->state == IN_PROGRESS) {
    atomic_store(&c->busy, 0);
    return violate(c, "a call on a communicator that is in progress");
  }
  if (!may_be_in_progress && c->state != SUCCESS) {
    atomic_store(&c->busy, 0);
    return c->state;
  }
  return SUCCESS;
}

static void leave(comm *c) { atomic_store(&c->busy, 0); }

/* ---- streams and events ---- */

static void run_group(group *g);

static void *run_stream(void *argument) {
  stream *s = argument;
  for (;;) {
    pthread_mutex_lock(&s->lock);
    while (!s->first && !s->ended) pthread_cond_wait(&s->changed, &s->lock);
    item *i = s->first;
    if (i && !(s->first = i->next)) s->last = &s->first;
    pthread_mutex_unlock(&s->lock);
    if (!i) break;
    event *e = i->event;
    if (i->kind == GROUP) run_group(i->group);
    if (i->kind == SLEEP) usleep((useconds_t)i->number);
    if (i->kind == COPY) memcpy(i->target, i->source, (size_t)i->number);
    if (i->kind == RECORD || i->kind == WAIT) {
      pthread_mutex_lock(&e->lock);
      if (i->kind == RECORD && e->done < i->number) e->done = i->number;
      if (i->kind == RECORD) pthread_cond_broadcast(&e->changed);
      while (i->kind == WAIT && e->done < i->number) pthread_cond_wait(&e->changed, &e->lock);
      pthread_mutex_unlock(&e->lock);
    }
    free(i);
  }
  free(s);
  return NULL;
}

static void enqueue(stream *s, item contents) {
  item *i = allocate(sizeof *i);
  *i = contents;
  i->next = NULL;
  pthread_mutex_lock(&s->lock);
  *s->last = i;
  s->last = &i->next;
  pthread_cond_signal(&s->changed);
  pthread_mutex_unlock(&s->lock);
}

stream *standin_stream_create(void) {
  stream *s = allocate(sizeof *s);
  pthread_mutex_init(&s->lock, NULL);
  pthread_cond_init(&s->changed, NULL);
  s->last = &s->first;
  start_thread(run_stream, s);
  return s;
}

void standin_stream_destroy(stream *s) {
  pthread_mutex_lock(&s->lock);
  s->ended = true;
  pthread_cond_signal(&s->changed);
  pthread_mutex_unlock(&s->lock);
}

void standin_stream_sleep(stream *s, long us) { enqueue(s, (item){.kind = SLEEP, .number = us}); }

void standin_stream_copy(stream *s, void *target, const void *source, long bytes) {
  enqueue(s, (item){.kind = COPY, .target = target, .source = source, .number = bytes});
}

event *standin_event_create(void) {
  event *e = allocate(sizeof *e);
  pthread_mutex_init(&e->lock, NULL);
  pthread_cond_init(&e->changed, NULL);
  return e;
}

void standin_event_record(event *e, stream *s) {
  pthread_mutex_lock(&e->lock);
  long number = ++e->recorded;
  pthread_mutex_unlock(&e->lock);
  enqueue(s, (item){.kind = RECORD, .event = e, .number = number});
}

void standin_stream_wait(stream *s, event *e) {
  pthread_mutex_lock(&e->lock);
  long number = e->recorded;
  pthread_mutex_unlock(&e->lock);
  enqueue(s, (item){.kind = WAIT, .event = e, .number = number});
}

int standin_event_done(event *e) {
  pthread_mutex_lock(&e->lock);
  bool done = e->done >= e->recorded;
  pthread_mutex_unlock(&e->lock);
  return done;
}

/* ---- running a group ---- */

static bool can_go_on(comm *c) {
  int state = c->state;
  return !c->aborted && (state == SUCCESS || state == IN_PROGRESS);
}

/* Move bytes of [*moved, size) without blocking: 1 if all are moved, 0 if not yet, -1 if the peer is gone. */
static int move_bytes(int socket, bool sending, char *data, size_t size, size_t *moved, bool *progress) {
  while (*moved < size) {
    ssize_t n = sending ? send(socket, data + *moved, size - *moved, MSG_NOSIGNAL) : recv(socket, data + *moved, size - *moved, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    if (n <= 0) return -1;
    *moved += (size_t)n;
    *progress = true;
  }
  *moved = 0;
  return 1;
}

/* Phases of a message: 0 the size goes, 1 the data go, 2 the receiver acknowledges, 3 done. -1: the peer is gone. */
static int advance(comm *c, op *o, bool *progress) {
  bool sending = o->kind == SEND;
  int socket = sending ? c->out[o->peer] : c->in[o->peer];
  int moved = 1;
  char answer = 1;
  if (o->phase == 0) {
    if (sending) o->header = o->bytes;
    moved = move_bytes(socket, sending, (char *)&o->header, sizeof o->header, &o->moved, progress);
    if (moved < 1) return moved;
    o->phase = 1;
    if (!sending && o->header != o->bytes) {
      answer = 2;
      (void)!send(socket, &answer, 1, MSG_NOSIGNAL);
      set_error(c, INVALID_USAGE, "message truncated: rank %d receives %zu bytes, rank %d sends %llu", c->rank, o->bytes, o->peer,
                (unsigned long long)o->header);
      return 0;
    }
  }
  if (o->phase == 1) {
    moved = move_bytes(socket, sending, o->data, o->bytes, &o->moved, progress);
    if (moved < 1 && sending) {
      /* A refusal may come before all is sent. */
      if (recv(socket, &answer, 1, 0) == 1) return set_error(c, INVALID_USAGE, "rank %d expects another size", o->peer), 0;
      return moved;
    }
    if (moved < 1) return moved;
    o->phase = 2;
  }
  moved = move_bytes(socket, !sending, &answer, 1, &o->moved, progress);
  if (moved < 1) return moved;
  if (answer != 1) return set_error(c, INVALID_USAGE, "rank %d expects another size", o->peer), 0;
  o->phase = 3;
  return 1;
}

static void copy_to_oneself(group *g) {
  for (int i = 0, next = 0; i < g->num_ops; i++) {
    op *send = &g->ops[i];
    if (send->kind != SEND || send->peer != g->comm->rank) continue;
    while (g->ops[next].kind != RECV || g->ops[next].peer != g->comm->rank) next++;
    memmove(g->ops[next].data, send->data, send->bytes);
    send->phase = g->ops[next++].phase = 3;
  }
}

static void wait_for_peers(group *g) {
  struct pollfd *fds = allocate((size_t)g->num_ops * sizeof *fds);
  nfds_t n = 0;
  for (int i = 0; i < g->num_ops; i++) {
    op *o = &g->ops[i];
    if (o->phase == 3 || (o->previous >= 0 && g->ops[o->previous].phase != 3) || o->start_us > now_us()) continue;
    bool writing = o->kind == SEND && o->phase < 2;
    fds[n].fd = o->kind == SEND ? g->comm->out[o->peer] : g->comm->in[o->peer];
    fds[n++].events = (short)(POLLIN | (writing ? POLLOUT : 0));
  }
  poll(fds, n, 1);
  free(fds);
}

static void move_messages(group *g) {
  comm *c = g->comm;
  bool gone = false;
  while (can_go_on(c)) {
    bool progress = false, finished = true;
    for (int i = 0; i < g->num_ops && !gone; i++) {
      op *o = &g->ops[i];
      if (o->phase == 3) continue;
      finished = false;
      if ((o->previous >= 0 && g->ops[o->previous].phase != 3) || o->start_us > now_us()) continue;
      if (advance(c, o, &progress) < 0) {
        gone = true;
        if (knobs[NOTICE_DEATH]) set_error(c, REMOTE_ERROR, "connection closed by a remote peer");
      }
    }
    if (finished && !gone) return;
    if (gone) usleep(1000);
    else if (!progress) wait_for_peers(g);
  }
}

static float from_bf16(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

static uint16_t to_bf16(float value) {
  uint32_t wide;
  memcpy(&wide, &value, 4);
  return (uint16_t)((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}

static void add_parts(group *g) {
#define ADD(type)                                                           \
  for (size_t k = 0; k < g->count; k++) {                                   \
    type sum = 0;                                                           \
    for (int r = 0; r < g->comm->size; r++) sum += ((type *)g->parts[r])[k]; \
    ((type *)g->result)[k] = sum;                                           \
  }                                                                         \
  break;
  switch (g->dtype) {
    case 0: ADD(int8_t)
    case 1: ADD(uint8_t)
    case 2: ADD(int32_t)
    case 4: ADD(int64_t)
    case 6: ADD(_Float16)
    case 7: ADD(float)
    case 8: ADD(double)
    case 9:
      for (size_t k = 0; k < g->count; k++) {
        float sum = 0;
        for (int r = 0; r < g->comm->size; r++) sum += from_bf16(((uint16_t *)g->parts[r])[k]);
        ((uint16_t *)g->result)[k] = to_bf16(sum);
      }
  }
#undef ADD
}

static void run_group(group *g) {
  comm *c = g->comm;
  int number = ++c->num_groups;
  uint64_t seed = (uint64_t)knobs[SEED] * 1000003u + (uint64_t)c->rank * 7919u + (uint64_t)number;
  while (number == knobs[HANG_GROUP] && !c->aborted) usleep(1000);
  if (number == knobs[FAIL_GROUP] && !c->aborted) set_error(c, (int)knobs[FAIL_CODE], "injected failure of group %d", number);
  for (int i = 0; i < g->num_ops; i++) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    if (knobs[DELAY_US]) g->ops[i].start_us = now_us() + (seed >> 33) % (uint64_t)(knobs[DELAY_US] + 1);
  }
  copy_to_oneself(g);
  move_messages(g);
  if (g->parts && can_go_on(c)) add_parts(g);
  for (int r = 0; g->parts && r < c->size; r++) free(g->parts[r]);
  free(g->parts);
  free(g->ops);
  free(g);
  atomic_fetch_sub(&c->pending, 1);
}

/* ---- groups of calls ---- */

static _Thread_local int depth, num_calls, call_error;
static _Thread_local op calls[4096];

static size_t size_of(int dtype) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return dtype >= 0 && dtype < 12 ? sizes[dtype] : 0;
}

typedef struct { stream *stream; group *group; } launch;

static void *run_launch(void *argument) {
  launch l = *(launch *)argument;
  comm *c = l.group->comm;
  free(argument);
  if (knobs[LAUNCH_US]) usleep((useconds_t)knobs[LAUNCH_US]);
  int expected = IN_PROGRESS;
  atomic_fetch_add(&c->pending, 1);
  enqueue(l.stream, (item){.kind = GROUP, .group = l.group});
  /* Unless it has failed since. */
  atomic_compare_exchange_strong(&c->state, &expected, SUCCESS);
  atomic_fetch_sub(&c->pending, 1);
  return NULL;
}

static int begin(group *g, stream *s) {
  comm *c = g->comm;
  int sends = 0, receives = 0;
  for (int i = 0; i < g->num_ops; i++) {
    op *o = &g->ops[i];
    o->previous = -1;
    for (int j = 0; j < i; j++)
      if (g->ops[j].kind == o->kind && g->ops[j].peer == o->peer) o->previous = j;
    if (o->peer != c->rank) continue;
    if (o->kind == SEND) sends++;
    else receives++;
  }
  if (sends != receives) {
    snprintf(c->last_error, sizeof c->last_error, "a send to oneself needs its receive in the same group");
    return INVALID_USAGE;
  }
  atomic_fetch_add(&c->pending, 1);
  launch *l = allocate(sizeof *l);
  *l = (launch){s, g};
  atomic_store(&c->state, IN_PROGRESS);
  if (c->blocking) {
    run_launch(l);
    return SUCCESS;
  }
  start_thread(run_launch, l);
  return IN_PROGRESS;
}

static group *new_group(comm *c, int max_ops) {
  group *g = allocate(sizeof *g);
  g->comm = c;
  g->ops = allocate((size_t)max_ops * sizeof *g->ops);
  return g;
}

static group *sum_group(const op *call) {
  comm *c = call->comm;
  group *g = new_group(c, 2 * c->size);
  g->parts = allocate((size_t)c->size * sizeof *g->parts);
  g->result = call->data;
  g->count = call->count;
  g->dtype = call->dtype;
  for (int r = 0; r < c->size; r++) {
    g->parts[r] = allocate(call->bytes);
    op message = *call;
    message.peer = r;
    message.kind = SEND;
    g->ops[g->num_ops++] = message;
    message.kind = RECV;
    message.data = g->parts[r];
    g->ops[g->num_ops++] = message;
  }
  return g;
}

int ncclGroupStart(void) {
  if (depth++ == 0) num_calls = call_error = 0;
  return SUCCESS;
}

int ncclGroupEnd(void) {
  if (depth == 0) return INVALID_USAGE;
  if (--depth) return SUCCESS;
  int outcome = call_error;
  while (num_calls && outcome == SUCCESS) {
    comm *c = calls[0].comm;
    if ((outcome = enter(c, false)) != SUCCESS) break;
    stream *s = calls[0].stream;
    group *g = calls[0].kind == SUM ? sum_group(&calls[0]) : new_group(c, num_calls);
    int kept = 0, first = calls[0].kind == SUM;
    for (int i = first; i < num_calls; i++) {
      if (calls[i].comm == c && calls[i].kind != SUM && !g->parts) g->ops[g->num_ops++] = calls[i];
      else calls[kept++] = calls[i];
    }
    num_calls = kept;
    outcome = begin(g, s);
    leave(c);
    if (outcome == IN_PROGRESS && num_calls == 0) return IN_PROGRESS;
    if (outcome == IN_PROGRESS) outcome = SUCCESS;
  }
  num_calls = 0;
  return outcome;
}

static int call(op_kind kind, const void *data, size_t count, int dtype, int peer, comm *c, stream *s) {
  ncclGroupStart();
  int outcome = enter(c, false);
  if (outcome == SUCCESS) {
    if (!data || !s || !size_of(dtype) || peer < 0 || peer >= c->size || num_calls == sizeof calls / sizeof *calls) {
      outcome = INVALID_ARGUMENT;
    } else {
      calls[num_calls++] = (op){.kind = kind, .comm = c, .stream = s, .data = (char *)data, .bytes = count * size_of(dtype),
                                .count = count, .dtype = dtype, .peer = peer};
    }
    leave(c);
  }
  if (outcome != SUCCESS) call_error = outcome;
  int ended = ncclGroupEnd();
  return outcome != SUCCESS ? outcome : ended;
}

int ncclSend(const void *data, size_t count, int dtype, int peer, comm *c, stream *s) {
  return call(SEND, data, count, dtype, peer, c, s);
}

int ncclRecv(void *data, size_t count, int dtype, int peer, comm *c, stream *s) {
  return call(RECV, data, count, dtype, peer, c, s);
}

int ncclAllReduce(const void *source, void *target, size_t count, int dtype, int reduction, comm *c, stream *s) {
  if (source != target || reduction != 0) return INVALID_ARGUMENT;
  return call(SUM, target, count, dtype, 0, c, s);
}

/* ---- communicators ---- */

static socklen_t address_of(struct sockaddr_un *address, const unique_id *id, int rank) {
  memset(address, 0, sizeof *address);
  address->sun_family = AF_UNIX;
  /* Abstract: nothing is left in the file system. */
  int n = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "%.40s-%d", id->internal, rank);
  return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

static void *run_init(void *argument) {
  comm *c = argument;
  struct sockaddr_un address;
  usleep((useconds_t)knobs[INIT_US]);
  c->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (bind(c->listener, (struct sockaddr *)&address, address_of(&address, &c->id, c->rank)) || listen(c->listener, c->size))
    set_error(c, SYSTEM_ERROR, "rank %d can't listen: %s", c->rank, strerror(errno));
  int missing = 2 * (c->size - 1);
  while (missing && !c->aborted && c->state == IN_PROGRESS) {
    for (int peer = 0; peer < c->size; peer++) {
      if (peer == c->rank || c->out[peer] >= 0) continue;
      int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
      if (connect(s, (struct sockaddr *)&address, address_of(&address, &c->id, peer))) {
        close(s);
        continue;
      }
      (void)!send(s, &c->rank, sizeof c->rank, MSG_NOSIGNAL);
      fcntl(s, F_SETFL, O_NONBLOCK);
      c->out[peer] = s;
      missing--;
    }
    int s = accept4(c->listener, NULL, NULL, SOCK_CLOEXEC), peer = -1;
    if (s >= 0 && recv(s, &peer, sizeof peer, MSG_WAITALL) == sizeof peer && peer >= 0 && peer < c->size) {
      fcntl(s, F_SETFL, O_NONBLOCK);
      c->in[peer] = s;
      missing--;
    } else if (s >= 0) {
      close(s);
    } else {
      usleep(500);
    }
  }
  int expected = IN_PROGRESS;
  if (!missing) atomic_compare_exchange_strong(&c->state, &expected, SUCCESS);
  atomic_fetch_sub(&c->pending, 1);
  return NULL;
}

int ncclGetVersion(int *version) { return *version = 23203, SUCCESS; }

int ncclGetUniqueId(unique_id *id) {
  unsigned long long words[2];
  memset(id, 0, sizeof *id);
  if (getrandom(words, sizeof words, 0) != sizeof words) return SYSTEM_ERROR;
  snprintf(id->internal, sizeof id->internal, "nccl-%016llx%016llx", words[0], words[1]);
  return SUCCESS;
}

int ncclCommInitRankConfig(comm **result, int size, unique_id id, int rank, const config *options) {
  if (size < 1 || rank < 0 || rank >= size) return INVALID_ARGUMENT;
  comm *c = allocate(sizeof *c);
  c->rank = rank;
  c->size = size;
  c->id = id;
  c->blocking = !options || options->blocking != 0;
  c->out = allocate((size_t)size * sizeof *c->out);
  c->in = allocate((size_t)size * sizeof *c->in);
  for (int peer = 0; peer < size; peer++) c->out[peer] = c->in[peer] = -1;
  c->listener = -1;
  c->state = IN_PROGRESS;
  c->pending = 1;
  c->magic = COMM_MAGIC;
  *result = c;
  if (c->blocking) return run_init(c), c->state;
  start_thread(run_init, c);
  return IN_PROGRESS;
}

int ncclCommGetAsyncError(comm *c, int *state) {
  int outcome = enter(c, true);
  if (outcome != SUCCESS) return outcome;
  *state = c->state;
  leave(c);
  return SUCCESS;
}

/* The memory of a communicator stays: a call on one that is gone is found out by its magic number. */
static int release(comm *c) {
  int outcome = enter(c, true);
  if (outcome != SUCCESS) return outcome;
  c->aborted = 1;
  while (c->pending) usleep(200);
  c->magic = 0;
  close(c->listener);
  for (int peer = 0; peer < c->size; peer++) {
    close(c->out[peer]);
    close(c->in[peer]);
  }
  leave(c);
  return SUCCESS;
}

int ncclCommAbort(comm *c) { return release(c); }

static void *run_finalize(void *argument) {
  comm *c = argument;
  while (!c->aborted && (knobs[FINALIZE_HANGS] || c->pending > 1)) usleep(200);
  int expected = IN_PROGRESS;
  if (!c->aborted) atomic_compare_exchange_strong(&c->state, &expected, SUCCESS);
  atomic_fetch_sub(&c->pending, 1);
  return NULL;
}

int ncclCommFinalize(comm *c) {
  int outcome = enter(c, false);
  if (outcome != SUCCESS) return outcome;
  c->state = IN_PROGRESS;
  atomic_fetch_add(&c->pending, 1);
  start_thread(run_finalize, c);
  leave(c);
  return IN_PROGRESS;
}

int ncclCommDestroy(comm *c) {
  if (c && c->magic == COMM_MAGIC && c->state == IN_PROGRESS) return violate(c, "a communicator is destroyed in progress");
  return release(c);
}

const char *ncclGetErrorString(int code) {
  static const char *const names[] = {"no error",         "unhandled cuda error", "unhandled system error", "internal error",
                                      "invalid argument", "invalid usage",        "remote error",           "in progress"};
  return code >= 0 && code < 8 ? names[code] : "unknown result code";
}

const char *ncclGetLastError(comm *c) { return c && c->magic == COMM_MAGIC ? c->last_error : ""; }
