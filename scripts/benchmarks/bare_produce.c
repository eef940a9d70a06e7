/* The bare loop that one-at-a-time produce is compared with: the same promise, nothing else.
 *
 *   bare_produce DIR COUNT BYTES      -> median, mean and p99 of one round trip in us
 *
 * Four processes on loopback TCP: a client sends BYTES and waits; the leader sends them on to two followers, overwrites
 * a zero-filled file and fdatasyncs; each follower overwrites its own, fdatasyncs and answers; when the leader's own sync
 * and one follower's answer are there, the client is answered. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define FILE_BYTES (64L << 20)

static void die(const char *what) {
    perror(what);
    exit(2);
}

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static int listen_on(int *port) {
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in place = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof place;
    if (bind(fd, (void *)&place, size) || listen(fd, 4)) die("listen");
    getsockname(fd, (void *)&place, &size);
    *port = ntohs(place.sin_port);
    return fd;
}

static int nodelay(int fd) {
    int one = 1;
    if (fd < 0) die("connection");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

static int dial(int port) {
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in place = {
        .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons(port)};
    if (connect(fd, (void *)&place, sizeof place)) die("dial");
    return nodelay(fd);
}

static int read_all(int fd, char *data, long size) {
    for (long at = 0; at < size;) {
        long n = read(fd, data + at, size - at);
        if (n <= 0) return 0;
        at += n;
    }
    return 1;
}

static void write_all(int fd, const char *data, long size) {
    for (long at = 0; at < size;) {
        long n = write(fd, data + at, size - at);
        if (n <= 0) exit(0);
        at += n;
    }
}

static int file_of(const char *folder, int number) {
    char name[4096];
    static char zeros[1 << 20];
    snprintf(name, sizeof name, "%s/bare-%d", folder, number);
    int fd = open(name, O_RDWR | O_CREAT | O_TRUNC, 0644);
    if (fd < 0) die(name);
    for (long at = 0; at < FILE_BYTES; at += sizeof zeros)
        if (pwrite(fd, zeros, sizeof zeros, at) != sizeof zeros) die("fill");
    if (fdatasync(fd)) die("fill");
    return fd;
}

static void store(int fd, const char *data, long size, long *at) {
    if (*at + size > FILE_BYTES) *at = 0;
    if (pwrite(fd, data, size, *at) != size || fdatasync(fd)) die("store");
    *at += size;
}

static void follower(const char *folder, int number, int listener, long size) {
    int file = file_of(folder, number), fd = nodelay(accept(listener, NULL, NULL));
    char *data = malloc(size);
    long at = 0;
    while (read_all(fd, data, size)) {
        store(file, data, size, &at);
        write_all(fd, "k", 1);
    }
    exit(0);
}

static void leader(const char *folder, int listener, int *ports, long size) {
    int file = file_of(folder, 0), followers[2], fd = nodelay(accept(listener, NULL, NULL));
    for (int i = 0; i < 2; i++) followers[i] = dial(ports[i]);
    char *data = malloc(size), byte;
    long at = 0, answered[2] = {0, 0}, number = 0;
    while (read_all(fd, data, size)) {
        number++;
        for (int i = 0; i < 2; i++) write_all(followers[i], data, size);
        store(file, data, size, &at);
        while (answered[0] < number && answered[1] < number) {
            struct pollfd ready[2] = {{followers[0], POLLIN, 0}, {followers[1], POLLIN, 0}};
            poll(ready, 2, -1);
            for (int i = 0; i < 2; i++)
                if (ready[i].revents && read(followers[i], &byte, 1) == 1) answered[i]++;
        }
        write_all(fd, "k", 1);
    }
    exit(0);
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

int main(int argc, char **argv) {
    if (argc != 4) {
        fprintf(stderr, "bare_produce DIR COUNT BYTES\n");
        return 2;
    }
    long count = atol(argv[2]), size = atol(argv[3]);
    int ports[3], listeners[3];
    signal(SIGPIPE, SIG_IGN);
    for (int i = 0; i < 3; i++) listeners[i] = listen_on(&ports[i]);
    for (int i = 0; i < 2; i++)
        if (!fork()) follower(argv[1], i + 1, listeners[i], size);
    if (!fork()) leader(argv[1], listeners[2], ports, size);
    int fd = dial(ports[2]);
    char *data = calloc(1, size), byte;
    double *took = malloc(count * sizeof *took), sum = 0;
    for (long i = -count / 10 - 1; i < count; i++) {
        double began = now_us();
        write_all(fd, data, size);
        if (read(fd, &byte, 1) != 1) die("answer");
        if (i >= 0) sum += took[i] = now_us() - began;
    }
    close(fd);
    qsort(took, count, sizeof *took, by_size);
    printf("%.1f %.1f %.1f\n", took[count / 2], sum / count, took[count * 99 / 100]);
    while (wait(NULL) > 0) {
    }
    return 0;
}
