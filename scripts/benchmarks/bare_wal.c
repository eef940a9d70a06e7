/* The bare loop that the log is compared with: fill files with zeros, overwrite them group by group, fdatasync each.
 *
 *   bare_wal write DIR FILES FILE_BYTES GROUP_BYTES     -> seconds, MB/s, median and p99 of one write + fdatasync in us
 *   bare_wal read FILE BUFFER_BYTES                     -> seconds, MB/s
 *   bare_wal random FILE SIZE COUNT                     -> reads a second
 *
 * The filling of the next file runs meanwhile, in steps of 1 MiB with a sync and a rest each, in a thread, as the log's
 * does, and counts. The first file is filled before the clock starts, on both sides. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define STEP (1 << 20)
#define MARK_BYTES 30
#define MARK_AT 4096
#define FRAMES_AT 12288

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void die(const char *what) {
    perror(what);
    exit(2);
}

static const char *folder;
static long file_bytes;
static volatile int hurry; /* the writer needs the file soon: no rests */

static int fill(long number) {
    char name[4096];
    static __thread char *zeros;
    if (!zeros) zeros = calloc(1, STEP);
    snprintf(name, sizeof name, "%s/%06ld", folder, number);
    int fd = open(name, O_RDWR | O_CREAT | O_TRUNC, 0644);
    if (fd < 0) die(name);
    if (posix_fallocate(fd, 0, file_bytes)) die("fallocate");
    for (long at = 0; at < file_bytes; at += STEP) {
        long size = file_bytes - at < STEP ? file_bytes - at : STEP;
        double began = now();
        if (pwrite(fd, zeros, size, at) != size) die("fill");
        if (fdatasync(fd)) die("fill sync");
        if (!hurry) usleep((now() - began) * 1e6);
    }
    return fd;
}

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int spare = -1;
static long files;

static void *filler(void *unused) {
    (void)unused;
    for (long number = 1; number <= files; number++) {
        int fd = fill(number);
        pthread_mutex_lock(&mutex);
        while (spare >= 0) pthread_cond_wait(&changed, &mutex);
        spare = fd;
        pthread_cond_signal(&changed);
        pthread_mutex_unlock(&mutex);
    }
    return NULL;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int write_loop(long group_bytes) {
    char *data = malloc(group_bytes);
    for (long i = 0; i < group_bytes; i++) data[i] = (char)(i * 2654435761u >> 13);
    long groups = (file_bytes - FRAMES_AT) / group_bytes, count = 0;
    double *took = malloc(sizeof *took * groups * files);
    pthread_t thread;
    int fd = fill(0);
    pthread_create(&thread, NULL, filler, NULL);
    double began = now();
    for (long number = 0; number < files; number++) {
        for (long group = 0; group < groups; group++) {
            double start = now();
            if (group > groups / 2) hurry = 1;
            if (pwrite(fd, data, group_bytes, FRAMES_AT + group * group_bytes) != group_bytes) die("pwrite");
            if (pwrite(fd, data, MARK_BYTES, MARK_AT * (1 + group % 2)) != MARK_BYTES) die("pwrite mark");
            if (fdatasync(fd)) die("fdatasync");
            took[count++] = now() - start;
        }
        close(fd);
        if (number + 1 < files) {
            pthread_mutex_lock(&mutex);
            while (spare < 0) pthread_cond_wait(&changed, &mutex);
            hurry = 0;
            fd = spare;
            spare = -1;
            pthread_cond_signal(&changed);
            pthread_mutex_unlock(&mutex);
        }
    }
    double seconds = now() - began;
    qsort(took, count, sizeof *took, by_value);
    printf("%.6f %.3f %.3f %.3f\n", seconds, (double)count * group_bytes / 1e6 / seconds, took[count / 2] * 1e6,
           took[count * 99 / 100] * 1e6);
    return 0;
}

static int read_loop(const char *name, long buffer_bytes) {
    char *buffer = malloc(buffer_bytes);
    int fd = open(name, O_RDONLY);
    if (fd < 0) die(name);
    double began = now(), total = 0;
    for (ssize_t got; (got = read(fd, buffer, buffer_bytes)) != 0; total += got)
        if (got < 0) die("read");
    double seconds = now() - began;
    printf("%.6f %.3f\n", seconds, total / 1e6 / seconds);
    return 0;
}

static int random_loop(const char *name, long size, long count) {
    char *buffer = malloc(size);
    int fd = open(name, O_RDONLY);
    if (fd < 0) die(name);
    long blocks = lseek(fd, 0, SEEK_END) / size - 1;
    unsigned long long dice = 88172645463325252ull;
    double began = now();
    for (long i = 0; i < count; i++) {
        dice ^= dice << 13, dice ^= dice >> 7, dice ^= dice << 17;
        if (pread(fd, buffer, size, (long)(dice % blocks) * size) != size) die("pread");
    }
    printf("%.3f\n", count / (now() - began));
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 6 && !strcmp(argv[1], "write")) {
        folder = argv[2];
        files = atol(argv[3]);
        file_bytes = atol(argv[4]);
        return write_loop(atol(argv[5]));
    }
    if (argc == 4 && !strcmp(argv[1], "read")) return read_loop(argv[2], atol(argv[3]));
    if (argc == 5 && !strcmp(argv[1], "random")) return random_loop(argv[2], atol(argv[3]), atol(argv[4]));
    fprintf(stderr, "bare_wal write DIR FILES FILE_BYTES GROUP_BYTES | bare_wal read FILE BUFFER_BYTES | bare_wal random FILE SIZE COUNT\n");
    return 2;
}
