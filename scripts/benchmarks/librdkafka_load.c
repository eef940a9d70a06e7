/* librdkafka as the producing client, with nothing around it that costs: one program in C.
 *
 *   librdkafka_load stream BOOTSTRAP TOPIC PARTITION PRODUCER SIZE RECORDS RATE LINGER_MS ACKS WAITS
 *       one producer, as fast as it can (RATE 0) or RATE records a second
 *   librdkafka_load singly BOOTSTRAP TOPIC PARTITIONS FIRST SIZE RECORDS CLIENTS ACKS WAITS
 *       CLIENTS producers, each in a thread of its own with one record under way: an ack sends its next
 *
 * Says "ready" when it has the topic's metadata, begins when a line comes on stdin, and then says
 *
 *   ACKED FAILED BEGAN ENDED CPU_S [reason of the first failure]       times are of the wall clock, in seconds
 *
 * Every record begins with its stamp: u32 producer, u64 number, big-endian. The file WAITS gets, for every record that was
 * acked, in the order of acks, how many seconds that took from the call that gave it to librdkafka, as a native float.
 *
 * The library is the one in the confluent-kafka wheel, which has no headers: what is used of it is declared here. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <endian.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

typedef struct rd_kafka_s rd_kafka_t;
typedef struct rd_kafka_conf_s rd_kafka_conf_t;
typedef struct rd_kafka_topic_s rd_kafka_topic_t;
typedef struct {
    int err;
    rd_kafka_topic_t *rkt;
    int32_t partition;
    void *payload;
    size_t len;
    void *key;
    size_t key_len;
    int64_t offset;
    void *opaque;
} rd_kafka_message_t;

rd_kafka_conf_t *rd_kafka_conf_new(void);
int rd_kafka_conf_set(rd_kafka_conf_t *, const char *name, const char *value, char *error, size_t error_size);
void rd_kafka_conf_set_dr_msg_cb(rd_kafka_conf_t *, void (*)(rd_kafka_t *, const rd_kafka_message_t *, void *));
void rd_kafka_conf_set_opaque(rd_kafka_conf_t *, void *);
rd_kafka_t *rd_kafka_new(int type, rd_kafka_conf_t *, char *error, size_t error_size);
rd_kafka_topic_t *rd_kafka_topic_new(rd_kafka_t *, const char *topic, void *conf);
int rd_kafka_produce(rd_kafka_topic_t *, int32_t partition, int flags, void *payload, size_t len, const void *key,
                     size_t key_len, void *opaque);
int rd_kafka_poll(rd_kafka_t *, int timeout_ms);
int rd_kafka_flush(rd_kafka_t *, int timeout_ms);
int rd_kafka_last_error(void);
const char *rd_kafka_err2str(int);
int rd_kafka_metadata(rd_kafka_t *, int all, rd_kafka_topic_t *, const void **metadata, int timeout_ms);

#define PRODUCER 0
#define COPY 2
#define QUEUE_FULL (-184)
#define STALLED_MS 60000

struct client {
    rd_kafka_t *handle;
    rd_kafka_topic_t *topic;
    int32_t partition;
    uint32_t id;
    long sent, acked, failed;
    float *waits;
    unsigned char *payload;
    const char *reason;
};

static long size, share;

static double now_s(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static double cpu_s(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return used.ru_utime.tv_sec + used.ru_utime.tv_usec / 1e6 + used.ru_stime.tv_sec + used.ru_stime.tv_usec / 1e6;
}

static void die(const char *what, const char *why) {
    fprintf(stderr, "%s: %s\n", what, why);
    exit(2);
}

/* False if the library's queue is full. The opaque is when it was given, in ns. */
static int give(struct client *client) {
    uint32_t id = htobe32(client->id);
    uint64_t number = htobe64(client->sent);
    memcpy(client->payload, &id, 4);
    memcpy(client->payload + 4, &number, 8);
    intptr_t given = (intptr_t)(now_s(CLOCK_MONOTONIC) * 1e9);
    if (rd_kafka_produce(client->topic, client->partition, COPY, client->payload, size, NULL, 0, (void *)given)) {
        if (rd_kafka_last_error() != QUEUE_FULL) die("produce", rd_kafka_err2str(rd_kafka_last_error()));
        return 0;
    }
    client->sent++;
    return 1;
}

static void delivered(rd_kafka_t *handle, const rd_kafka_message_t *message, void *opaque) {
    struct client *client = opaque;
    (void)handle;
    if (message->err) {
        if (!client->failed++) client->reason = rd_kafka_err2str(message->err);
    } else {
        client->waits[client->acked++] = now_s(CLOCK_MONOTONIC) - (intptr_t)message->opaque / 1e9;
    }
}

static void set(rd_kafka_conf_t *conf, const char *name, const char *value) {
    char error[512];
    if (rd_kafka_conf_set(conf, name, value, error, sizeof error)) die(name, error);
}

static void make(struct client *client, char *bootstrap, char *topic, char *acks, char *linger_ms, long records) {
    char error[512];
    FILE *noise = fopen("/dev/urandom", "rb");
    client->payload = malloc(size);
    client->waits = malloc(records * sizeof *client->waits);
    client->reason = "";
    if (!noise || fread(client->payload, 1, size, noise) != (size_t)size) die("/dev/urandom", "unreadable");
    fclose(noise);
    rd_kafka_conf_t *conf = rd_kafka_conf_new();
    set(conf, "bootstrap.servers", bootstrap);
    set(conf, "log_level", "2");
    set(conf, "acks", acks);
    set(conf, "linger.ms", linger_ms);
    set(conf, "batch.size", "1000000");
    set(conf, "batch.num.messages", "100000");
    set(conf, "queue.buffering.max.messages", "200000");
    set(conf, "queue.buffering.max.kbytes", "262144");
    set(conf, "enable.idempotence", "false");
    set(conf, "max.in.flight.requests.per.connection", "5");
    rd_kafka_conf_set_dr_msg_cb(conf, delivered);
    rd_kafka_conf_set_opaque(conf, client);
    client->handle = rd_kafka_new(PRODUCER, conf, error, sizeof error);
    if (!client->handle) die("rd_kafka_new", error);
    client->topic = rd_kafka_topic_new(client->handle, topic, NULL);
    const void *metadata;
    int failure = rd_kafka_metadata(client->handle, 0, client->topic, &metadata, 20000);
    if (failure) die("metadata", rd_kafka_err2str(failure));
}

static void begin(double *began, double *cpu) {
    char line[16];
    puts("ready");
    fflush(stdout);
    if (!fgets(line, sizeof line, stdin)) exit(2);
    *began = now_s(CLOCK_REALTIME);
    *cpu = cpu_s();
}

static void stream(struct client *client, long records, double rate) {
    double start = now_s(CLOCK_MONOTONIC);
    while (client->sent < records) {
        long due = records;
        if (rate > 0) {
            due = (now_s(CLOCK_MONOTONIC) - start) * rate + 1;
            if (due > records) due = records;
        }
        long stretch = 0;
        while (client->sent < due && stretch++ < 256)
            if (!give(client)) {
                rd_kafka_poll(client->handle, 10);
                break;
            }
        rd_kafka_poll(client->handle, client->sent >= due && client->sent < records);
    }
    rd_kafka_flush(client->handle, STALLED_MS);
}

static void *singly(void *argument) {
    struct client *client = argument;
    for (long number = 0; number < share && !client->failed; number++) {
        give(client);
        while (client->acked + client->failed <= number)
            if (!rd_kafka_poll(client->handle, STALLED_MS)) die("singly", "no answer in a minute");
    }
    return NULL;
}

int main(int argc, char **argv) {
    double began, cpu;
    long clients = 1;
    struct client *all;
    if (argc == 12 && !strcmp(argv[1], "stream")) {
        all = calloc(1, sizeof *all);
        all->partition = atoi(argv[4]);
        all->id = atoi(argv[5]);
        size = atol(argv[6]);
        long records = atol(argv[7]);
        make(all, argv[2], argv[3], argv[10], argv[9], records);
        begin(&began, &cpu);
        stream(all, records, atof(argv[8]));
    } else if (argc == 11 && !strcmp(argv[1], "singly")) {
        clients = atol(argv[8]);
        share = atol(argv[7]) / clients;
        size = atol(argv[6]);
        all = calloc(clients, sizeof *all);
        pthread_t *threads = calloc(clients, sizeof *threads);
        for (long at = 0; at < clients; at++) {
            all[at].id = atoi(argv[5]) + at;
            all[at].partition = all[at].id % atoi(argv[4]);
            make(&all[at], argv[2], argv[3], argv[9], "0", share);
        }
        begin(&began, &cpu);
        for (long at = 0; at < clients; at++)
            if (pthread_create(&threads[at], NULL, singly, &all[at])) die("pthread_create", "failed");
        for (long at = 0; at < clients; at++) pthread_join(threads[at], NULL);
    } else {
        fprintf(stderr, "librdkafka_load stream|singly …: see the source\n");
        return 2;
    }
    double ended = now_s(CLOCK_REALTIME);
    long acked = 0, failed = 0;
    const char *reason = "";
    FILE *file = fopen(argv[argc - 1], "wb");
    for (long at = 0; at < clients; at++) {
        struct client *client = &all[at];
        if (!file || fwrite(client->waits, sizeof *client->waits, client->acked, file) != (size_t)client->acked)
            die(argv[argc - 1], "unwritable");
        acked += client->acked;
        failed += client->failed;
        if (*client->reason) reason = client->reason;
    }
    if (fclose(file)) die(argv[argc - 1], "unwritable");
    printf("%ld %ld %.6f %.6f %.6f %s\n", acked, failed, began, ended, cpu_s() - cpu, reason);
    fflush(stdout);
    _Exit(0); /* tearing 64 clients down says nothing about a server */
}
