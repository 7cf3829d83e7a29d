/* Memory of the simulated cards: address space of this process, never touched unless copied, counted in the table. */
#define _GNU_SOURCE
#include <pthread.h>
#include "machine.h"
#include "memory.h"

typedef struct block {
    range here;
    struct block *next;
} block;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static block *blocks;
static pool pools[MAX_PLACES];

/* -- errors that stay -- */

enum { INITIALIZATION_ERROR = 3 };
static int sticky, used;

static void forked(void) {
    if (used) sticky = INITIALIZATION_ERROR; /* CUDA does not survive a fork */
}
__attribute__((constructor)) static void watch(void) { pthread_atfork(0, 0, forked); }
int broken(void) {
    used = 1;
    return sticky;
}
/* The switch of the tests: from now on every call gives this error, as after a device-side assert (710). */
API void simulate_error(int error) { sticky = error; }

/* -- which cards this process sees, in its order -- */

static int places[MAX_PLACES], seen;

static int named(const char *word) {
    char own[80];
    for (int card = 0; card < cards(); card++)
        for (int slice = mig() ? SLICES - 1 : -1; slice >= -1; slice--) {
            uuid(card, slice, own, sizeof own);
            if (slice == -1 && mig()) continue; /* the whole card is not to be had */
            if (!strncmp(word, own, strlen(word))) return card + (slice > 0 ? slice * MAX_CARDS : 0);
        }
    return -1;
}
static int numbered(const char *word) {
    char *end;
    long number = strtol(word, &end, 10);
    while (*end == ' ') end++;
    return *end || end == word || number < 0 || number >= cards() ? -1 : number;
}
static void look(void) {
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    char *copy = text ? strdup(text) : 0, *rest = copy, *word;
    if (!copy)
        for (; seen < cards(); seen++) places[seen] = seen;
    while (rest && (word = strsep(&rest, ",")) && seen < MAX_PLACES) {
        while (*word == ' ') word++;
        int place = strncmp(word, "GPU-", 4) && strncmp(word, "MIG-", 4) ? numbered(word) : named(word);
        if (place < 0) break; /* what follows something unknown is not seen */
        for (int i = 0; i < seen; i++)
            if (places[i] == place) seen = -1; /* one named twice: none is seen */
        if (seen < 0) break;
        places[seen++] = place;
    }
    free(copy);
    if (seen < 0) seen = 0;
    if (mig() && seen > 1) seen = 1; /* a process sees one slice */
}
int device_count(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT; /* like the driver's: later changes of the variable are not seen */
    pthread_once(&once, look);
    return seen;
}
int place_of(int device) { return device >= 0 && device < device_count() ? places[device] : 0; }
int use(int device) {
    int place = place_of(device);
    self()->context[place] = 1;
    return place;
}

/* -- ranges of memory -- */

static void note(void *start, size_t bytes, enum kind kind, int place) {
    block *b = malloc(sizeof *b);
    *b = (block){{start, bytes, kind, place}, blocks};
    blocks = b;
}
static int forget(void *start, enum kind kind, range *gone) {
    for (block **b = &blocks; *b; b = &(*b)->next)
        if ((*b)->here.start == start && (*b)->here.kind == kind) {
            block *found = *b;
            *gone = found->here;
            *b = found->next;
            free(found);
            return 1;
        }
    return 0;
}
static int counted(int place, long bytes) {
    if (bytes > 0 && used_at(place) + bytes > place_bytes()) return 0;
    self()->bytes[place] += bytes;
    return 1;
}
/* A stream-ordered pool keeps what is given back to it: it grows where that is not enough, and shrinks in trim(). */
static int pooled(int place, size_t bytes) {
    pool *p = pools + place;
    size_t most = p->used + bytes;
    if (most > p->reserved) {
        if (!counted(place, most - p->reserved)) return 0;
        p->reserved = most;
    }
    p->used = most;
    if (p->used > p->used_high) p->used_high = p->used;
    if (p->reserved > p->reserved_high) p->reserved_high = p->reserved;
    return 1;
}
/* The driver's tables for a block: nothing unless asked for. */
static size_t with_tables(size_t bytes) { return bytes + bytes / 4096 * setting("SIM_PAGE_TABLES", 0); }
void *take(int place, size_t bytes, enum kind kind) {
    void *start = 0;
    pthread_mutex_lock(&lock);
    if (kind == PINNED) {
        if (!posix_memalign(&start, 4096, bytes ? bytes : 1)) memset(start, 0, bytes); /* pinned pages are resident */
    } else if (kind == POOLED ? pooled(place, bytes) : counted(place, with_tables(bytes))) {
        start = mmap(0, bytes ? bytes : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (start == MAP_FAILED) {
            perror("simulated GPU: mmap");
            abort();
        }
    }
    if (start) note(start, bytes, kind, place);
    pthread_mutex_unlock(&lock);
    return start;
}
int give_back(void *start, enum kind kind) {
    range gone;
    pthread_mutex_lock(&lock);
    int found = forget(start, kind, &gone);
    if (found && kind == PLAIN) counted(gone.place, -(long)with_tables(gone.bytes));
    if (found && kind == POOLED) pools[gone.place].used -= gone.bytes;
    if (found && kind != PINNED) munmap(start, gone.bytes ? gone.bytes : 1);
    pthread_mutex_unlock(&lock);
    return found;
}
int pin(void *start, size_t bytes) {
    pthread_mutex_lock(&lock);
    note(start, bytes, PINNED, -1);
    pthread_mutex_unlock(&lock);
    return 0;
}
int find(const void *pointer, range *found) {
    int is_there = 0;
    pthread_mutex_lock(&lock);
    for (block *b = blocks; b && !is_there; b = b->next)
        if ((char *)pointer >= b->here.start && (char *)pointer < b->here.start + b->here.bytes) {
            *found = b->here;
            is_there = 1;
        }
    pthread_mutex_unlock(&lock);
    return is_there;
}

/* -- the parts of expandable segments: addresses first, memory later -- */

int count(int place, long bytes) {
    pthread_mutex_lock(&lock);
    int fits = counted(place, bytes);
    pthread_mutex_unlock(&lock);
    return fits;
}
void map(void *start, size_t bytes, int place) {
    mprotect(start, bytes, PROT_READ | PROT_WRITE);
    pthread_mutex_lock(&lock);
    note(start, bytes, MAPPED, place);
    pthread_mutex_unlock(&lock);
}
void unmap(void *start, size_t bytes) {
    range gone;
    pthread_mutex_lock(&lock);
    forget(start, MAPPED, &gone);
    pthread_mutex_unlock(&lock);
    mmap(start, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

/* -- pools -- */

pool *pool_at(int place) { return pools + place; }
void trim(int place, size_t keep) {
    pool *p = pools + place;
    pthread_mutex_lock(&lock);
    size_t left = p->used > keep ? p->used : keep;
    if (left < p->reserved) {
        counted(place, -(long)(p->reserved - left));
        p->reserved = left;
    }
    pthread_mutex_unlock(&lock);
}
