/* One product y = x W^T on a PLoRA device, from C: set up a queue, build a descriptor, ring, wait, read.
 *
 *   plora defs --format c-header > plora_device.h
 *   cc -std=c99 -O2 -o one_product one_product.c
 *   plora device --file /dev/shm/plora --preset tiny &
 *   ./one_product /dev/shm/plora
 *
 * The device is the functional model behind a mapped file (docs/host.md, "A host in C"). On a real one only
 * `register_access` differs: a 32-bit load or store at a mapped address.
 */
#define _POSIX_C_SOURCE 200809L
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "plora_device.h"

/* The file: a mailbox for register accesses, and device memory behind it. */
enum { REQUEST, KIND, OFFSET, VALUE, ANSWERED };
enum { READ, WRITE, END };
enum { MEMORY_OFFSET = 4096 };

/* The queue: its window is the first 64 KiB of memory. */
enum { SUBMISSION = 0x0000, RESULT = 0x4000, WEIGHTS = 0x8000, LIMIT = 0x10000, DEPTH = 2, SLOT_LOG2 = 12, PASS = 1 };
/* The product: with K = 32 a row of W is one 64-byte word, and W lies packed as it is, row by row, in whole stripes. */
enum { N = 8, K = 32 };

static uint32_t *mailbox;
static uint8_t *memory;

static void fail(const char *what)
{
    fprintf(stderr, "one_product: %s\n", what);
    exit(1);
}

static void pause_a_little(unsigned *tries, const char *waiting_for)
{
    const struct timespec a_little = {0, 100000};
    if (++*tries > 100000)
        fail(waiting_for);
    nanosleep(&a_little, NULL);
}

static uint32_t register_access(uint32_t kind, uint32_t offset, uint32_t value)
{
    uint32_t request = mailbox[REQUEST] + 1;
    unsigned tries = 0;
    mailbox[KIND] = kind;
    mailbox[OFFSET] = offset;
    mailbox[VALUE] = value;
    __atomic_store_n(&mailbox[REQUEST], request, __ATOMIC_RELEASE);
    while (__atomic_load_n(&mailbox[ANSWERED], __ATOMIC_ACQUIRE) != request)
        pause_a_little(&tries, "no answer to a register access");
    return mailbox[VALUE];
}

static void set_wide(uint32_t low_offset, uint64_t value)
{
    register_access(WRITE, low_offset, (uint32_t)value);
    register_access(WRITE, low_offset + 4, (uint32_t)(value >> 32));
}

/* FP16 of a small integer: enough for an example whose sums are exact. */
static uint16_t half(int value)
{
    unsigned magnitude = (unsigned)abs(value), exponent = 0;
    if (!magnitude)
        return 0;
    while (magnitude >> (exponent + 1))
        exponent++;
    return (uint16_t)((value < 0) << 15 | (15 + exponent) << 10 | ((magnitude << (10 - exponent)) & 0x3FF));
}

static void open_queue(unsigned queue)
{
    if (register_access(READ, PLORA_REG_ID, 0) != PLORA_ID_VALUE)
        fail("no device behind this file");
    if (register_access(READ, PLORA_REG_INTERFACE, 0) != PLORA_INTERFACE_VERSION)
        fail("the device speaks another version of the interface");
    register_access(WRITE, PLORA_QUEUE(queue, PASID), 42);
    register_access(WRITE, PLORA_QUEUE(queue, DEPTH), DEPTH);
    set_wide(PLORA_QUEUE(queue, BASE_LO), 0);
    set_wide(PLORA_QUEUE(queue, LIMIT_LO), LIMIT);
    set_wide(PLORA_QUEUE(queue, SQ_BASE_LO), SUBMISSION);
    set_wide(PLORA_QUEUE(queue, CQ_BASE_LO), RESULT);
    register_access(WRITE, PLORA_QUEUE(queue, SLOTS), SLOT_LOG2 | SLOT_LOG2 << 8);
    register_access(WRITE, PLORA_QUEUE(queue, PASS), PASS);
    register_access(WRITE, PLORA_QUEUE(queue, CTRL), 1);
    if (!(register_access(READ, PLORA_QUEUE(queue, QSTATUS), 0) & 1))
        fail("the device refuses the queue");
}

/* Line 0 with its valid word last: the device looks at nothing before that. */
static void publish(uint8_t *slot, const struct plora_descriptor *d)
{
    uint8_t line[PLORA_LINE_BYTES];
    plora_submission_line(d, 0, PASS, line);
    memcpy(slot, line, PLORA_VALID_OFFSET);
    __atomic_store_n((uint32_t *)(void *)(slot + PLORA_VALID_OFFSET), plora_valid_word(PASS), __ATOMIC_RELEASE);
}

int main(int argc, char **argv)
{
    struct stat file;
    int handle = argc == 2 ? open(argv[1], O_RDWR) : -1;
    if (handle < 0 || fstat(handle, &file) || file.st_size < MEMORY_OFFSET + LIMIT)
        fail("give the file of a device: plora device --file FILE");
    mailbox = mmap(NULL, (size_t)file.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, handle, 0);
    if (mailbox == MAP_FAILED)
        fail("cannot map the file");
    memory = (uint8_t *)mailbox + MEMORY_OFFSET;
    open_queue(0);

    /* Operands: W where it stays, x in the submission slot, one stripe after its start. */
    uint32_t channels = register_access(READ, PLORA_REG_CAPS, 0) & 0xFF;
    uint16_t *w = (uint16_t *)(void *)(memory + WEIGHTS);
    uint16_t *x = (uint16_t *)(void *)(memory + SUBMISSION + channels * PLORA_LINE_BYTES);
    int expected[N] = {0};
    for (int k = 0; k < K; k++) {
        x[k] = half(k % 5);
        for (int n = 0; n < N; n++) {
            w[n * K + k] = half((n + k) % 7 - 3);
            expected[n] += (k % 5) * ((n + k) % 7 - 3);
        }
    }

    struct plora_descriptor d = {0};
    d.type = PLORA_TYPE_READ_COMPUTE;
    d.op = PLORA_OP_GEMV;
    d.dtype = PLORA_DTYPE_FP16;
    d.device_address = WEIGHTS;
    d.device_bytes = (N + channels - 1) / channels * channels * PLORA_LINE_BYTES;
    d.device_rows = N;
    d.device_columns = K;
    d.gpu_bytes = K * 2;
    d.gpu_rows = 1;
    d.gpu_columns = K;
    publish(memory + SUBMISSION, &d);
    register_access(WRITE, PLORA_QUEUE(0, DOORBELL), 1);

    /* The completion line is written last, after the result. */
    const uint8_t *slot = memory + RESULT;
    unsigned tries = 0;
    while (__atomic_load_n((const uint32_t *)(const void *)(slot + PLORA_VALID_OFFSET), __ATOMIC_ACQUIRE) !=
           plora_valid_word(PASS))
        pause_a_little(&tries, "no completion");
    struct plora_completion c;
    plora_completion_unpack(slot, &c);
    if (c.status != PLORA_STATUS_OK) {
        fprintf(stderr, "one_product: status %u\n", c.status);
        register_access(END, 0, 0);
        return 1;
    }
    const uint16_t *y = (const uint16_t *)(const void *)(slot + PLORA_RESULT_OFFSET);
    int wrong = 0;
    for (int n = 0; n < N; n++) {
        printf("y[%d] = %d (0x%04x)\n", n, expected[n], y[n]);
        wrong += y[n] != half(expected[n]);
    }
    register_access(WRITE, PLORA_QUEUE(0, CQ_HEAD), 1);
    register_access(END, 0, 0);
    if (wrong)
        fail("a result differs from integer arithmetic");
    return 0;
}
