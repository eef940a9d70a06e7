/* The bare loop that replication is compared with: one process sends groups to two others over loopback; all three
 * overwrite zero-filled files and fdatasync each group; a group counts when all three have it durable.
 *
 *   bare_replication ship DIR BYTES GROUP_BYTES OUTSTANDING    -> seconds, MB/s; the files are filled before
 *   bare_replication fill DIR BYTES GROUP_BYTES OUTSTANDING    -> the same, and each fills its file by 64 MiB as it goes
 *   bare_replication catchup DIR BYTES                         -> seconds, MB/s: sendfile into write + sync every 8 MiB,
 *                                                                 in a new file whose space is reserved
 *   bare_replication overwrite DIR BYTES                       -> the same, in a file that was filled with zeros before
 *   bare_replication one DIR ROUNDS BYTES                      -> median us of one group, one at a time
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define STEP (1 << 20)
#define FILE_BYTES (64L << 20)

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void die(const char *what) {
    perror(what);
    exit(2);
}

static int new_file(const char *folder, const char *name) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0644);
    if (fd < 0) die(path);
    return fd;
}

static void fill(int fd, long at, long end) {
    char *zeros = calloc(1, STEP);
    for (; at < end; at += STEP)
        if (pwrite(fd, zeros, STEP, at) != STEP) die("fill");
    if (fdatasync(fd)) die("fill sync");
    free(zeros);
}

static int zero_file(const char *folder, const char *name, long bytes) {
    int fd = new_file(folder, name);
    fill(fd, 0, bytes);
    return fd;
}

/* With `fills` the next 64 MiB are filled when the first group comes there. */
static int fills;

static void commit(int file, const char *data, long group, long bytes) {
    long at = group * bytes;
    if (fills && (!at || at / FILE_BYTES != (at - bytes) / FILE_BYTES)) fill(file, at, at + FILE_BYTES + bytes);
    if (pwrite(file, data, bytes, at) != bytes) die("pwrite");
    if (fdatasync(file)) die("fdatasync");
}

static void tune(int fd) {
    int on = 1, size = 4 << 20;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &size, sizeof size);
}

static void pair(int ends[2]) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (void *)&address, sizeof address) || listen(listener, 1)) die("listen");
    getsockname(listener, (void *)&address, &length);
    ends[0] = socket(AF_INET, SOCK_STREAM, 0);
    tune(ends[0]);
    if (connect(ends[0], (void *)&address, sizeof address)) die("connect");
    ends[1] = accept(listener, NULL, NULL);
    tune(ends[1]);
    close(listener);
}

static void take(int fd, char *data, long bytes) {
    for (long got = 0; got < bytes;) {
        ssize_t n = read(fd, data + got, bytes - got);
        if (n <= 0) die("read");
        got += n;
    }
}

static void give(int fd, const char *data, long bytes) {
    for (long sent = 0; sent < bytes;) {
        ssize_t n = write(fd, data + sent, bytes - sent);
        if (n <= 0) die("write");
        sent += n;
    }
}

static void follower(int link, int file, long groups, long group_bytes) {
    char *data = malloc(group_bytes), ack = 1;
    for (long group = 0; group < groups; group++) {
        take(link, data, group_bytes);
        commit(file, data, group, group_bytes);
        give(link, &ack, 1);
    }
    _exit(0);
}

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static long held[3], appended, groups_total, size_of_group;
static int links[2], own;
static char *content;

static void count(int who) {
    pthread_mutex_lock(&mutex);
    held[who]++;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
}

static void *reader(void *number) {
    long who = (long)number;
    char acks[4096];
    while (held[1 + who] < groups_total) {
        ssize_t n = read(links[who], acks, sizeof acks);
        if (n <= 0) die("acks");
        while (n--) count(1 + who);
    }
    return NULL;
}

static void *committer(void *unused) {
    (void)unused;
    for (long group = 0; group < groups_total; group++) {
        pthread_mutex_lock(&mutex);
        while (appended <= group) pthread_cond_wait(&changed, &mutex);
        pthread_mutex_unlock(&mutex);
        commit(own, content, group, size_of_group);
        count(0);
    }
    return NULL;
}

static void *sender(void *number) {
    long who = (long)number;
    for (long group = 0; group < groups_total; group++) {
        pthread_mutex_lock(&mutex);
        while (appended <= group) pthread_cond_wait(&changed, &mutex);
        pthread_mutex_unlock(&mutex);
        give(links[who], content, size_of_group);
    }
    return NULL;
}

static long least(void) {
    long low = held[0] < held[1] ? held[0] : held[1];
    return low < held[2] ? low : held[2];
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int ship(const char *folder, long bytes, long group_bytes, long outstanding) {
    groups_total = bytes / group_bytes;
    size_of_group = group_bytes;
    content = malloc(group_bytes);
    for (long i = 0; i < group_bytes; i++) content[i] = (char)(i * 2654435761u >> 13);
    own = zero_file(folder, "leader", fills ? 0 : bytes + STEP);
    for (int who = 0; who < 2; who++) {
        int ends[2];
        int file = zero_file(folder, who ? "second" : "first", fills ? 0 : bytes + STEP);
        pair(ends);
        if (!fork()) follower(ends[1], file, groups_total, group_bytes);
        close(ends[1]);
        links[who] = ends[0];
    }
    pthread_t threads[5];
    pthread_create(&threads[0], NULL, committer, NULL);
    for (long who = 0; who < 2; who++) {
        pthread_create(&threads[1 + who], NULL, reader, (void *)who);
        pthread_create(&threads[3 + who], NULL, sender, (void *)who);
    }
    double *took = malloc(sizeof *took * groups_total), began = now();
    pthread_mutex_lock(&mutex);
    for (long group = 0; group < groups_total; group++) {
        while (group - least() >= outstanding) pthread_cond_wait(&changed, &mutex);
        double start = now();
        appended = group + 1;
        pthread_cond_broadcast(&changed);
        if (outstanding == 1) {
            while (least() <= group) pthread_cond_wait(&changed, &mutex);
            took[group] = now() - start;
        }
    }
    while (least() < groups_total) pthread_cond_wait(&changed, &mutex);
    pthread_mutex_unlock(&mutex);
    double seconds = now() - began;
    for (int at = 0; at < 5; at++) pthread_join(threads[at], NULL);
    while (wait(NULL) > 0) {}
    if (outstanding == 1) {
        qsort(took, groups_total, sizeof *took, by_value);
        printf("%.3f\n", took[groups_total / 2] * 1e6);
    } else
        printf("%.6f %.3f\n", seconds, groups_total * (double)group_bytes / 1e6 / seconds);
    return 0;
}

static int catchup(const char *folder, long bytes, int filled) {
    int from = zero_file(folder, "leader", bytes), into = zero_file(folder, "first", filled ? bytes : 0);
    if (posix_fallocate(into, 0, bytes)) die("fallocate");
    int ends[2];
    pair(ends);
    double began = now();
    if (!fork()) {
        char *data = malloc(8 * STEP);
        for (long at = 0; at < bytes;) {
            long size = bytes - at < 8 * STEP ? bytes - at : 8 * STEP;
            take(ends[1], data, size);
            if (pwrite(into, data, size, at) != size) die("pwrite");
            if (fdatasync(into)) die("fdatasync");
            at += size;
        }
        _exit(0);
    }
    off_t at = 0;
    while (at < bytes)
        if (sendfile(ends[0], from, &at, STEP) <= 0) die("sendfile");
    while (wait(NULL) > 0) {}
    double seconds = now() - began;
    printf("%.6f %.3f\n", seconds, bytes / 1e6 / seconds);
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 6 && !strcmp(argv[1], "ship")) return ship(argv[2], atol(argv[3]), atol(argv[4]), atol(argv[5]));
    if (argc == 6 && !strcmp(argv[1], "fill")) {
        fills = 1;
        return ship(argv[2], atol(argv[3]), atol(argv[4]), atol(argv[5]));
    }
    if (argc == 4 && !strcmp(argv[1], "catchup")) return catchup(argv[2], atol(argv[3]), 0);
    if (argc == 4 && !strcmp(argv[1], "overwrite")) return catchup(argv[2], atol(argv[3]), 1);
    if (argc == 5 && !strcmp(argv[1], "one")) return ship(argv[2], atol(argv[3]) * atol(argv[4]), atol(argv[4]), 1);
    fprintf(stderr, "see the comment at the top\n");
    return 2;
}
