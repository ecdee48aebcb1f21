// Codes two or four to a byte, with escapes (spec/codecs/linear.md): conx/codecs/symbols.py in two kernels.
//
// An escaped field takes the next of the escapes, so a field's escape is found by counting those before it: `count`
// counts the escaped fields of each tile, `unpack` adds up the tiles before its own, counts within it, and writes.
// Several runs, segments of one tensor, are done at once: a block's y is its run.

#define TILE_BYTES 4096  // packed bytes of a block: 16 for each thread
#define OWN_BYTES (TILE_BYTES / THREADS)

struct Segment {
    i64 packed;        // offset of the packed bytes
    i64 fields;        // how many fields there are
    i64 escapes;       // offset of the escapes, in the buffer that holds them
    i64 escape_count;  // how many there are
    i64 loose;         // 1: the last escape may be unused, and is then a field 0
    i64 out;           // offset of the first code to write
    i64 tiles;         // place of the run's first tile in `counts`
};

DEVICE u32 fields_escaped(u32 byte, int per_byte) {
    if (per_byte == 2) return ((byte & 0x0F) == 0x0F) + (byte >> 4 == 0x0F);
    u32 both = byte & byte >> 1 & 0x55;
    return (both & 1) + (both >> 2 & 1) + (both >> 4 & 1) + (both >> 6 & 1);
}

// The packed bytes of a thread; those beyond the run are zero, which is no escape.
struct Own {
    u32 words[OWN_BYTES / 4];
};

DEVICE Own own_bytes(const u8* packed, i64 start, i64 bytes) {
    Own own = {{0, 0, 0, 0}};
    bool whole = aligned(packed + start, OWN_BYTES);
    if (whole && start + OWN_BYTES <= bytes) {
        Four four = *(const Four*)(packed + start);
        own.words[0] = four.x;
        own.words[1] = four.y;
        own.words[2] = four.z;
        own.words[3] = four.w;
        return own;
    }
    UNROLL
    for (int j = 0; j < OWN_BYTES; ++j)
        if (start + j < bytes) own.words[j / 4] |= (u32)packed[start + j] << j % 4 * 8;
    return own;
}

DEVICE u32 own_escaped(const u8* packed, i64 start, i64 bytes, int per_byte) {
    Own own = own_bytes(packed, start, bytes);
    u32 found = 0;
    UNROLL
    for (int j = 0; j < OWN_BYTES; ++j) found += fields_escaped(own.words[j / 4] >> j % 4 * 8 & 0xFF, per_byte);
    return found;
}

KERNEL count(const u8* stage, const Segment* runs, i64 per_byte, u32* counts) {
    SHARED u32 found[THREADS];
    const Segment run = runs[blockIdx.y];
    i64 bytes = (run.fields + per_byte - 1) / per_byte, tile = (i64)blockIdx.x * TILE_BYTES;
    if (tile >= bytes) return;
    EACH_THREAD {
        found[thread] = own_escaped(stage + run.packed, tile + (i64)thread * OWN_BYTES, bytes, (int)per_byte);
    }
    for (int half = THREADS / 2; half; half /= 2) {
        SYNC;
        EACH_THREAD {
            if (thread < half) found[thread] += found[thread + half];
        }
    }
    SYNC;
    EACH_THREAD {
        if (thread == 0) counts[run.tiles + blockIdx.x] = found[0];
    }
}

// The codes of a thread's fields, sixteen at once. `next` is the number of its first escape, and in the end that of the
// first which is not its.
template <int N>
DEVICE void own_codes(const Own& own, const Segment& run, i64 first, const u8* escapes, int center, u8* out,
                      i64& next, u32* flags) {
    const int bits = 8 / N, escape = (1 << bits) - 1, bias = N == 2 ? 7 : 1;
    bool whole = aligned(out + first, 16);
    UNROLL
    for (int part = 0; part < N; ++part) {
        u32 made[4] = {0, 0, 0, 0};
        UNROLL
        for (int j = 0; j < 16; ++j) {
            const int field = part * 16 + j, byte = field / N;
            int code = (int)(own.words[byte / 4] >> (byte % 4 * 8 + field % N * bits)) & escape;
            if (first + field >= run.fields) {
                if (code) RAISE(flags, BAD_UNUSED);
                continue;
            }
            if (code != escape) {
                code -= bias;
            } else {
                code = next < run.escape_count ? escapes[next] : 0;
                if (next >= run.escape_count) RAISE(flags, BAD_COUNT);
                ++next;
            }
            made[j / 4] |= ((u32)(code + center) & 0xFF) << j % 4 * 8;
        }
        i64 at = first + part * 16;
        if (whole && at + 16 <= run.fields) {
            Four four = {made[0], made[1], made[2], made[3]};
            *(Four*)(out + at) = four;
            continue;
        }
        UNROLL
        for (int j = 0; j < 16; ++j)
            if (at + j < run.fields) out[at + j] = (u8)(made[j / 4] >> j % 4 * 8);
    }
}

// `center` is the code taken as 0.
KERNEL unpack(const u8* stage, const Segment* runs, i64 per_byte, const u32* counts, const u8* escapes, i64 center,
              u8* out, u32* flags) {
    SHARED u32 before[2][THREADS];
    SHARED u32 earlier[THREADS];
    const Segment run = runs[blockIdx.y];
    i64 bytes = (run.fields + per_byte - 1) / per_byte, tile = (i64)blockIdx.x * TILE_BYTES;
    i64 tiles = (bytes + TILE_BYTES - 1) / TILE_BYTES;
    if (bytes == 0 && blockIdx.x == 0 && run.escape_count) RAISE(flags, BAD_COUNT);
    if (tile >= bytes) return;
    EACH_THREAD {
        before[0][thread] = own_escaped(stage + run.packed, tile + (i64)thread * OWN_BYTES, bytes, (int)per_byte);
        u32 sum = 0;
        for (i64 t = thread; t < (i64)blockIdx.x; t += THREADS) sum += counts[run.tiles + t];
        earlier[thread] = sum;
    }
    int now = 0;
    for (int step = 1; step < THREADS; step *= 2) {  // inclusive sums
        SYNC;
        EACH_THREAD {
            before[1 - now][thread] = before[now][thread] + (thread >= step ? before[now][thread - step] : 0);
            if (thread % (2 * step) == 0) earlier[thread] += earlier[thread + step];
        }
        now = 1 - now;
    }
    SYNC;
    EACH_THREAD {
        i64 next = (i64)earlier[0] + (thread ? before[now][thread - 1] : 0);
        i64 start = tile + (i64)thread * OWN_BYTES;
        Own own = own_bytes(stage + run.packed, start, bytes);
        if (per_byte == 2)
            own_codes<2>(own, run, start * 2, escapes + run.escapes, (int)center, out + run.out, next, flags);
        else
            own_codes<4>(own, run, start * 4, escapes + run.escapes, (int)center, out + run.out, next, flags);
        if ((i64)blockIdx.x == tiles - 1 && thread == THREADS - 1) {  // knows the sum of all
            i64 unused = run.escape_count - next;
            if (unused < 0 || unused > run.loose) RAISE(flags, BAD_COUNT);
            if (unused == 1 && run.loose && escapes[run.escapes + next] != (u8)-7) RAISE(flags, BAD_UNUSED);
        }
    }
}
