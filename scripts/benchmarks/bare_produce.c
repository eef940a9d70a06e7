/* The bare loop that one-at-a-time produce is compared with: the same promise, nothing else.
 *
 *   bare_produce DIR COUNT BYTES      -> median, mean and p99 of one round trip in us, with a client in C
 *   bare_produce DIR kafka TOPIC      -> serves that topic to a Kafka client until killed; first prints its port
 *
 * Processes on loopback TCP: a client sends a request and waits; the leader sends it on to two followers, overwrites a
 * zero-filled file and fdatasyncs; each follower overwrites its own, fdatasyncs and answers; when the leader's own sync
 * and one follower's answer are there, the client is answered. In the second form the leader knows as much of Kafka's
 * protocol as a librdkafka producer asks for, so that the same client can be held against both servers. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define FILE_BYTES (64L << 20)
#define DATA_BYTES (4L << 20)

static char data[DATA_BYTES];

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

static void follower(const char *folder, int number, int listener) {
    int file = file_of(folder, number), fd = nodelay(accept(listener, NULL, NULL));
    uint32_t size;
    long at = 0;
    while (read_all(fd, data, 4)) {
        memcpy(&size, data, 4);
        if (!read_all(fd, data, ntohl(size))) break;
        store(file, data, ntohl(size), &at);
        write_all(fd, "k", 1);
    }
    exit(0);
}

static int file, followers[2];
static long stored_at, answered[2], number;

/* `request` with its length before it, on three disks, two of them for sure. */
static void replicate(const char *request, long size) {
    char byte;
    number++;
    for (int i = 0; i < 2; i++) write_all(followers[i], request, size);
    store(file, request, size, &stored_at);
    while (answered[0] < number && answered[1] < number) {
        struct pollfd ready[2] = {{followers[0], POLLIN, 0}, {followers[1], POLLIN, 0}};
        poll(ready, 2, -1);
        for (int i = 0; i < 2; i++)
            if (ready[i].revents && read(followers[i], &byte, 1) == 1) answered[i]++;
    }
}

static void leader(const char *folder, int listener, int *ports) {
    file = file_of(folder, 0);
    int fd = nodelay(accept(listener, NULL, NULL));
    for (int i = 0; i < 2; i++) followers[i] = dial(ports[i]);
    uint32_t size;
    while (read_all(fd, data, 4)) {
        memcpy(&size, data, 4);
        if (!read_all(fd, data + 4, ntohl(size))) break;
        replicate(data, 4 + ntohl(size));
        write_all(fd, "k", 1);
    }
    exit(0);
}

/* What a librdkafka producer asks, answered in the versions that are told here: Produce 7, Metadata 4, ApiVersions 3. */

static char out[65536];
static long out_size;

static void put(long value, int octets) {
    for (int i = octets - 1; i >= 0; i--) out[out_size++] = value >> 8 * i;
}

static void put_string(const char *text, long size) {
    put(size, 2);
    memcpy(out + out_size, text, size);
    out_size += size;
}

static long get(const char *from, int octets) {
    long value = 0;
    for (int i = 0; i < octets; i++) value = value << 8 | (unsigned char)from[i];
    return value;
}

static void answer_kafka(int fd, long size, int port, const char *topic, long *offset) {
    static const short apis[][3] = {{0, 3, 7}, {1, 4, 4}, {2, 1, 1}, {3, 4, 4}, {18, 0, 3}};
    long api = get(data + 4, 2), version = get(data + 6, 2), acks;
    const char *body = data + 14 + (short)get(data + 12, 2);
    out_size = 4;
    put(get(data + 8, 4), 4);
    if (api == 18 && version == 3) {
        put(0, 2), put(6, 1);
        for (int i = 0; i < 5; i++) put(apis[i][0], 2), put(apis[i][1], 2), put(apis[i][2], 2), put(0, 1);
        put(0, 4), put(0, 1);
    } else if (api == 3) {
        put(0, 4), put(1, 4), put(1, 4), put_string("127.0.0.1", 9), put(port, 4), put(-1, 2);
        put_string("bare", 4), put(1, 4), put(1, 4);
        put(0, 2), put_string(topic, strlen(topic)), put(0, 1), put(1, 4);
        put(0, 2), put(0, 4), put(1, 4), put(1, 4), put(1, 4), put(1, 4), put(1, 4);
    } else if (api == 0) {
        long skip = (short)get(body, 2);
        acks = (short)get(body + 2 + (skip > 0 ? skip : 0), 2);
        replicate(data, 4 + size);
        put(1, 4), put_string(topic, strlen(topic)), put(1, 4);
        put(0, 4), put(0, 2), put((*offset)++, 8), put(-1, 8), put(0, 8), put(0, 4);
        if (!acks) return;
    } else {
        fprintf(stderr, "API %ld version %ld is not known here\n", api, version);
        exit(1);
    }
    long whole = out_size;
    out_size = 0;
    put(whole - 4, 4);
    write_all(fd, out, whole);
}

static void serve_kafka(const char *folder, int listener, int *ports, const char *topic) {
    struct pollfd all[16] = {{listener, POLLIN, 0}};
    long count = 1, offset = 0;
    file = file_of(folder, 0);
    for (int i = 0; i < 2; i++) followers[i] = dial(ports[i]);
    printf("%d\n", ports[2]);
    fflush(stdout);
    while (poll(all, count, -1) > 0) {
        for (long i = count - 1; i > 0; i--) {
            if (!all[i].revents) continue;
            long size = read_all(all[i].fd, data, 4) ? get(data, 4) : -1;
            if (size < 0 || size > DATA_BYTES - 4 || !read_all(all[i].fd, data + 4, size)) {
                close(all[i].fd);
                all[i] = all[--count];
                continue;
            }
            answer_kafka(all[i].fd, size, ports[2], topic, &offset);
        }
        if (all[0].revents && count < 16) all[count++] = (struct pollfd){nodelay(accept(listener, NULL, NULL)), POLLIN, 0};
    }
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

int main(int argc, char **argv) {
    if (argc != 4) {
        fprintf(stderr, "bare_produce DIR COUNT BYTES, or DIR kafka TOPIC\n");
        return 2;
    }
    int ports[3], listeners[3];
    signal(SIGPIPE, SIG_IGN);
    for (int i = 0; i < 3; i++) listeners[i] = listen_on(&ports[i]);
    for (int i = 0; i < 2; i++)
        if (!fork()) follower(argv[1], i + 1, listeners[i]);
    if (!strcmp(argv[2], "kafka")) serve_kafka(argv[1], listeners[2], ports, argv[3]);
    long count = atol(argv[2]), size = atol(argv[3]);
    if (!fork()) leader(argv[1], listeners[2], ports);
    int fd = dial(ports[2]);
    char byte;
    uint32_t length = htonl(size - 4);
    memcpy(data, &length, 4);
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
