// kafkajs as a user writes it: `node kafkajs_client.js BOOTSTRAP TOPIC RECORDS PARTITIONS IDEMPOTENT`.
// On stdin a line "go on" lets it produce the second half. It says "half" on stdout, then the acked count, then each
// record that it consumed, as "partition value".
const { Kafka, logLevel, CompressionTypes } = require("kafkajs");

const [, , bootstrap, topic, records, partitions, idempotent] = process.argv;
const kafka = new Kafka({
  clientId: "kafkajs-test",
  brokers: bootstrap.split(","),
  logLevel: logLevel.NOTHING,
  retry: { initialRetryTime: 50, maxRetryTime: 500, retries: 100 },
});

async function produce(from, to, producer) {
  let acked = 0;
  for (let at = from; at < to; at += 2000) {
    const messages = [];
    for (let n = at; n < Math.min(at + 2000, to); n++) {
      messages.push({ partition: n % partitions, value: `${n} record of a test, the same words in every one of them` });
    }
    await producer.send({ topic, messages, acks: -1, compression: CompressionTypes.GZIP });
    acked += messages.length;
  }
  return acked;
}

async function main() {
  const producer = kafka.producer({ idempotent: idempotent === "true", maxInFlightRequests: 1 });
  await producer.connect();
  const half = records / 2;
  let acked = await produce(0, half, producer);
  console.log("half");
  const goOn = new Promise((resolve) => process.stdin.once("data", resolve));
  await goOn;
  acked += await produce(half, Number(records), producer);
  await producer.disconnect();
  console.log(`acked ${acked}`);

  const consumer = kafka.consumer({ groupId: `${topic}-group`, sessionTimeout: 6000, heartbeatInterval: 500 });
  await consumer.connect();
  await consumer.subscribe({ topic, fromBeginning: true });
  const lines = [];
  await new Promise((resolve, reject) => {
    consumer.run({
      eachBatch: async ({ batch, resolveOffset, heartbeat }) => {
        for (const message of batch.messages) {
          lines.push(`${batch.partition} ${message.value}`);
          resolveOffset(message.offset);
        }
        await heartbeat();
        if (lines.length >= records) resolve();
      },
    }).catch(reject);
  });
  await consumer.disconnect();
  process.stdout.write(lines.join("\n") + "\n", () => process.exit(0));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
