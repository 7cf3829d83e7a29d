/* What the runtime's and the driver's library share, in memory.c: errors that stay, the cards seen, memory. */
#pragma once
#include <stddef.h>

int broken(void);      /* the error that every call gives from now on, or 0 */
int device_count(void);
int place_of(int device);          /* where a device is that this process sees; CUDA_VISIBLE_DEVICES is applied */
int use(int device);               /* the same, and this process has a context there from now on */

enum kind { PLAIN, POOLED, PINNED, MAPPED };
void *take(int place, size_t bytes, enum kind kind); /* null where it does not fit */
int give_back(void *start, enum kind kind);          /* whether it was there */
int pin(void *start, size_t bytes);                  /* note host memory that somebody else owns */

typedef struct {
    char *start;
    size_t bytes;
    enum kind kind;
    int place;
} range;
int find(const void *pointer, range *found); /* which range a pointer is in; 0 if in none */

int count(int place, long bytes);             /* more (or fewer) bytes in use; 0 where they do not fit */
void map(void *start, size_t bytes, int place);
void unmap(void *start, size_t bytes);

typedef struct { size_t used, reserved, used_high, reserved_high; } pool;
pool *pool_at(int place);
void trim(int place, size_t keep);
