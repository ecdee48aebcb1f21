// Floats in byte planes (spec/codecs/planes.md), and floats as they are (spec/codecs/raw.md), into the target's type.

// `stride` bytes lie between the beginnings of planes; the first has the bits that were the exponent's.
template <int S, int T> DEVICE void planes(const u8* RESTRICT first, i64 stride, i64 count, bool exact,
                                           typename Bits<T>::type* RESTRICT out) {
    const int width = sizeof(typename Bits<S>::type);
    i64 tile = (i64)blockIdx.x * TILE;
    EACH_THREAD {
        bool whole = aligned(first, GROUP) && stride % GROUP == 0, wide = aligned(out, GROUP * sizeof(*out));
        u32 plane[ROUNDS][width], bits[GROUP];
        UNROLL
        for (int round = 0; round < ROUNDS; ++round) {
            i64 at = tile + ahead_of(round, thread);
            UNROLL
            for (int j = 0; j < width; ++j)
                plane[round][j] = at < count ? get(first + j * stride + at, count - at, whole) : 0;
        }
        UNROLL
        for (int round = 0; round < ROUNDS; ++round) {
            i64 at = tile + ahead_of(round, thread), left = count - at;
            if (left <= 0) continue;
            UNROLL
            for (int k = 0; k < GROUP; ++k) {
                u64 turned = 0;
                UNROLL
                for (int j = 0; j < width; ++j) turned = turned << 8 | (plane[round][j] >> 8 * k & 0xFF);
                u64 value = turned >> 1 | (turned & 1) << (8 * width - 1);
                bits[k] = converted<S, T>(value, exact);
            }
            put(out + at, bits, left, wide);
        }
    }
}

template <int S, int T> DEVICE void cast(const typename Bits<S>::type* RESTRICT values, i64 count,
                                         typename Bits<T>::type* RESTRICT out) {
    i64 tile = (i64)blockIdx.x * TILE;
    EACH_THREAD {
        bool wide = aligned(out, GROUP * sizeof(*out));
        typename Bits<S>::type read[ROUNDS][GROUP];
        u32 bits[GROUP];
        UNROLL
        for (int round = 0; round < ROUNDS; ++round) {
            i64 at = tile + ahead_of(round, thread);
            UNROLL
            for (int k = 0; k < GROUP; ++k) read[round][k] = at + k < count ? values[at + k] : 0;
        }
        UNROLL
        for (int round = 0; round < ROUNDS; ++round) {
            i64 at = tile + ahead_of(round, thread), left = count - at;
            if (left <= 0) continue;
            UNROLL
            for (int k = 0; k < GROUP; ++k) bits[k] = converted<S, T>(read[round][k], false);
            put(out + at, bits, left, wide);
        }
    }
}

#define PLANES(S, T, name)                                                                                         \
    KERNEL planes_##name(const u8* RESTRICT first, i64 stride, i64 count, i64 exact,                               \
                         Bits<T>::type* RESTRICT out) {                                                            \
        planes<S, T>(first, stride, count, exact != 0, out);                                                       \
    }                                                                                                              \
    KERNEL cast_##name(const Bits<S>::type* RESTRICT values, i64 count, Bits<T>::type* RESTRICT out) {             \
        cast<S, T>(values, count, out);                                                                            \
    }

PLANES(F64, F32, float64_float32)
PLANES(F64, F16, float64_float16)
PLANES(F64, BF16, float64_bfloat16)
PLANES(F32, F32, float32_float32)
PLANES(F32, F16, float32_float16)
PLANES(F32, BF16, float32_bfloat16)
PLANES(F16, F32, float16_float32)
PLANES(F16, F16, float16_float16)
PLANES(F16, BF16, float16_bfloat16)
PLANES(BF16, F32, bfloat16_float32)
PLANES(BF16, F16, bfloat16_float16)
PLANES(BF16, BF16, bfloat16_bfloat16)
