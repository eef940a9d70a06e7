/* Many Kafka clients, each with one Produce request under way: an ack sends the client's next record.
 *
 *   many_clients PORT CLIENTS COUNT REQUEST STAMP_AT CRC_AT ERROR_AT PARTITION_AT PARTITIONS FIRST
 *       -> acked records, seconds, median and p99 of one round trip in us
 *
 * REQUEST is a file with one whole Produce request of one record. Before each sending its stamp (u32 client, u64 number)
 * is written into it, the batch's CRC32C made anew (of everything behind it), and the partition: client modulo PARTITIONS.
 * ERROR_AT is where the answer has its error code. Clients are numbered from FIRST. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <endian.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define ANSWER_BYTES_MAX 4096

static uint32_t table[256];

static void make_table(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++) crc = crc & 1 ? crc >> 1 ^ 0x82F63B78 : crc >> 1;
        table[i] = crc;
    }
}

static uint32_t crc32c(const unsigned char *data, long size) {
    uint32_t crc = 0xFFFFFFFF;
    for (long at = 0; at < size; at++) crc = table[(crc ^ data[at]) & 0xFF] ^ crc >> 8;
    return ~crc;
}

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static void die(const char *what) {
    perror(what);
    exit(2);
}

static unsigned char request[1 << 20];
static long size, stamp_at, crc_at, error_at, partition_at, partitions;

struct client {
    int fd;
    uint32_t id;
    uint64_t number;
    long got;
    double sent_us;
    unsigned char answer[ANSWER_BYTES_MAX];
};

static void send_next(struct client *client) {
    uint32_t id = htobe32(client->id), partition = htobe32(client->id % partitions), crc;
    uint64_t number = htobe64(client->number++);
    memcpy(request + partition_at, &partition, 4);
    memcpy(request + stamp_at, &id, 4);
    memcpy(request + stamp_at + 4, &number, 8);
    crc = htobe32(crc32c(request + crc_at + 4, size - crc_at - 4 - 3)); /* behind the records: three empty tag lists */
    memcpy(request + crc_at, &crc, 4);
    client->got = 0;
    client->sent_us = now_us();
    if (send(client->fd, request, size, 0) != size) die("send");
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

int main(int argc, char **argv) {
    if (argc != 11) {
        fprintf(stderr, "many_clients PORT CLIENTS COUNT REQUEST STAMP_AT CRC_AT ERROR_AT PARTITION_AT PARTITIONS FIRST\n");
        return 2;
    }
    long port = atol(argv[1]), clients = atol(argv[2]), count = atol(argv[3]), acked = 0;
    FILE *file = fopen(argv[4], "rb");
    if (!file) die(argv[4]);
    size = fread(request, 1, sizeof request, file);
    stamp_at = atol(argv[5]), crc_at = atol(argv[6]), error_at = atol(argv[7]);
    partition_at = atol(argv[8]), partitions = atol(argv[9]);
    make_table();
    struct client *all = calloc(clients, sizeof *all);
    double *took = malloc(count * sizeof *took);
    int poll = epoll_create1(0), one = 1;
    struct sockaddr_in place = {
        .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons(port)};
    for (long i = 0; i < clients; i++) {
        all[i].fd = socket(AF_INET, SOCK_STREAM, 0);
        all[i].id = atol(argv[10]) + i;
        if (connect(all[i].fd, (void *)&place, sizeof place)) die("connect");
        setsockopt(all[i].fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &all[i]};
        epoll_ctl(poll, EPOLL_CTL_ADD, all[i].fd, &event);
    }
    long share = count / clients;
    double began = now_us();
    for (long i = 0; i < clients; i++) send_next(&all[i]);
    while (acked < share * clients) {
        struct epoll_event ready[64];
        int found = epoll_wait(poll, ready, 64, 30000);
        if (found <= 0) die("no answer in 30 s");
        for (int i = 0; i < found; i++) {
            struct client *client = ready[i].data.ptr;
            long n = recv(client->fd, client->answer + client->got, ANSWER_BYTES_MAX - client->got, 0);
            if (n <= 0) die("the server closed a connection");
            client->got += n;
            uint32_t length;
            memcpy(&length, client->answer, 4);
            if (client->got < 4 || client->got < 4 + (long)be32toh(length)) continue;
            if (client->answer[error_at] || client->answer[error_at + 1]) {
                fprintf(stderr, "error code %d\n", client->answer[error_at] << 8 | client->answer[error_at + 1]);
                return 1;
            }
            took[acked++] = now_us() - client->sent_us;
            if ((long)client->number < share) send_next(client);
        }
    }
    double seconds = (now_us() - began) / 1e6;
    qsort(took, acked, sizeof *took, by_size);
    printf("%ld %.6f %.1f %.1f\n", acked, seconds, took[acked / 2], took[acked * 99 / 100]);
    return 0;
}
