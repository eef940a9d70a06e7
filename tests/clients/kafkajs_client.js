// kafkajs as a user writes it: `node kafkajs_client.js BOOTSTRAP TOPIC RECORDS PARTITIONS IDEMPOTENT`.
// In the middle of producing it says "half" on stdout and goes on; then the acked count, then each record that it
// consumed, as "partition value".
const { Kafka, logLevel, CompressionTypes } = require("kafkajs");

const [, , bootstrap, topic, records, partitions, idempotent] = process.argv;
const kafka = new Kafka({
  clientId: "kafkajs-test",
  brokers: bootstrap.split(","),
  logLevel: logLevel.NOTHING,
  retry: { initialRetryTime: 50, maxRetryTime: 500, retries: 100 },
});

async function produce(producer) {
  let acked = 0;
  let told = false;
  for (let at = 0; at < records; at += 2000) {
    const messages = [];
    for (let n = at; n < Math.min(at + 2000, records); n++) {
      messages.push({ partition: n % partitions, value: `${n} record of a test, the same words in every one of them` });
    }
    const sent = producer.send({ topic, messages, acks: -1, compression: CompressionTypes.GZIP });
    if (!told && at >= records / 2) {
      told = true;
      console.log("half");
    }
    await sent;
    acked += messages.length;
  }
  return acked;
}

async function main() {
  const producer = kafka.producer({ idempotent: idempotent === "true", maxInFlightRequests: 1 });
  await producer.connect();
  const acked = await produce(producer);
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
