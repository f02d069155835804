/* Preloaded into PostgreSQL: its clock is that of the machine plus an offset in microseconds, read from a file.
 *
 * The file CHAOS_CLOCK holds one 64-bit integer and is mapped, so that a write to it is a clock step. Monotonic clocks
 * are unchanged, as on a machine whose time server sets the clock.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *step_us;

__attribute__((constructor)) static void map_step(void) {
    const char *path = getenv("CHAOS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *mapped = mmap(0, sizeof *step_us, PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED)
        step_us = mapped;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = (int)syscall(SYS_clock_gettime, clock, now);
    if (result == 0 && step_us && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t step = *step_us, nanoseconds = now->tv_nsec + step % 1000000 * 1000;
        now->tv_sec += step / 1000000;
        if (nanoseconds < 0)
            now->tv_sec--, nanoseconds += 1000000000;
        else if (nanoseconds >= 1000000000)
            now->tv_sec++, nanoseconds -= 1000000000;
        now->tv_nsec = nanoseconds;
    }
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec at;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &at);
    now->tv_sec = at.tv_sec;
    now->tv_usec = at.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (result)
        *result = at.tv_sec;
    return at.tv_sec;
}
