/* The machine: which process has how many bytes on which card. One file in shared memory, named by SIM_TABLE. */
#pragma once
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define MAX_CARDS 8
#define SLICES 2 /* of a card that MIG splits */
#define MAX_PLACES (MAX_CARDS * SLICES)
#define MAX_PROCESSES 64
#define MIB (1ul << 20)
#define CONTEXT_BYTES (412 * MIB) /* what a process takes by using a card at all; real ones differ */
#define DRIVER_BYTES (256 * MIB)  /* what the driver reserves on each card */

/* A place is a card, or a slice of one: slice s of card c is place c + s * MAX_CARDS. */
typedef struct {
    int pid;
    unsigned long long started; /* tells a process from a later one with its number */
    int context[MAX_PLACES];
    unsigned long bytes[MAX_PLACES];
} process;

static unsigned long setting(const char *name, unsigned long otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtoul(text, 0, 10) : otherwise;
}
static int cards(void) {
    unsigned long n = setting("SIM_DEVICES", 1);
    return n < MAX_CARDS ? n : MAX_CARDS;
}
static int mig(void) { return setting("SIM_MIG", 0) != 0; }
static unsigned long card_bytes(void) { return setting("SIM_TOTAL_MIB", 24576) * MIB; }
static unsigned long place_bytes(void) { return card_bytes() / (mig() ? SLICES : 1); }
static int uuid_byte(int card) { return 0x50 + card; }

/* The UUID of a card, or (slice >= 0) of one of its slices. */
static void uuid(int card, int slice, char *text, unsigned n) {
    unsigned b = uuid_byte(card) * 0x101, tail = slice < 0 ? b : (unsigned)slice;
    snprintf(text, n, "%s-%04x%04x-%04x-%04x-%04x-%04x%04x%04x", slice < 0 ? "GPU" : "MIG", b, b, b, b, b, b, b, tail);
}

static process *table(void) {
    static process *mapped;
    if (mapped) return mapped;
    const char *name = getenv("SIM_TABLE");
    int file = open(name && *name ? name : "/dev/shm/simulated_gpu", O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, sizeof(process) * MAX_PROCESSES)) {
        perror("simulated GPU: SIM_TABLE");
        abort();
    }
    void *found = mmap(0, sizeof(process) * MAX_PROCESSES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return mapped = found;
}

/* When a process began, in the system's ticks; 0 if there is none, or it has ended and nobody has waited for it. */
static unsigned long long start_of(int pid) {
    char path[40], text[1024], state;
    unsigned long long started;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int file = open(path, O_RDONLY);
    if (file < 0) return 0;
    ssize_t n = read(file, text, sizeof text - 1);
    close(file);
    text[n > 0 ? n : 0] = 0;
    char *rest = strrchr(text, ')'); /* a name may have blanks and brackets */
    const char *fields = " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu";
    if (!rest || sscanf(rest + 1, fields, &state, &started) != 2 || state == 'Z') return 0;
    return started;
}
static int alive(const process *p) { return p->pid && (p->pid == getpid() || start_of(p->pid) == p->started); }

static process *self(void) {
    static __thread process *mine;
    process *all = table();
    int me = getpid();
    if (mine && mine->pid == me) return mine;
    for (int i = 0; i < MAX_PROCESSES; i++)
        if (all[i].pid == me && all[i].started == start_of(me)) return mine = all + i;
    for (int i = 0; i < MAX_PROCESSES; i++) {
        int old = all[i].pid;
        if (old != me && alive(all + i)) continue;
        if (!__sync_bool_compare_and_swap(&all[i].pid, old, me)) continue;
        memset(all[i].context, 0, sizeof all[i].context);
        memset(all[i].bytes, 0, sizeof all[i].bytes);
        all[i].started = start_of(me);
        return mine = all + i;
    }
    fprintf(stderr, "simulated GPU: more than %d processes\n", MAX_PROCESSES);
    abort();
}

static unsigned long held(const process *p, int place) { return p->bytes[place] + (p->context[place] ? CONTEXT_BYTES : 0); }

/* What all processes have at a place, the driver's own part besides. */
static unsigned long used_at(int place) {
    unsigned long sum = DRIVER_BYTES / (mig() ? SLICES : 1);
    for (int i = 0; i < MAX_PROCESSES; i++) {
        process *p = table() + i;
        if (held(p, place) && alive(p)) sum += held(p, place);
    }
    return sum;
}
