// What lets g++ compile the kernels for the host: a block runs as loops over its threads, phase after phase.
#include <cstdint>
#include <cstring>

#define CONX_HOST
#define KERNEL extern "C" void
#define DEVICE static inline
#define EACH_THREAD for (int thread = 0; thread < THREADS; ++thread)
#define SYNC
#define SHARED static
#define UNROLL
#define MULTIPLY_HIGH(a, b) ((unsigned int)((unsigned long long)(a) * (b) >> 32))
#define RAISE(flags, bits) (*(flags) |= (bits))

struct Index {
    unsigned int x, y;
};
static Index blockIdx;
extern "C" void set_block(long long x, long long y) { blockIdx = {(unsigned int)x, (unsigned int)y}; }

static inline float float_of(unsigned int bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline unsigned int bits_of(float value) {
    unsigned int bits;
    memcpy(&bits, &value, 4);
    return bits;
}
static inline double double_of(unsigned long long bits) {
    double value;
    memcpy(&value, &bits, 8);
    return value;
}

// cvt.rn.f16.f32, in integers.
static inline unsigned short half_of(float value) {
    unsigned int bits = bits_of(value), magnitude = bits & 0x7FFFFFFF, sign = bits >> 16 & 0x8000;
    if (magnitude > 0x7F800000) return 0x7FFF;  // as the hardware answers to a NaN
    if (magnitude >= 0x477FF000) return (unsigned short)(sign | 0x7C00);
    if (magnitude >= 0x38800000) {
        unsigned int kept = magnitude - 0x38000000;
        return (unsigned short)(sign | ((kept + 0xFFF + (kept >> 13 & 1)) >> 13));
    }
    if (magnitude < 0x33000000) return (unsigned short)sign;
    unsigned int mantissa = (magnitude & 0x7FFFFF) | 0x800000, shift = 126 - (magnitude >> 23);
    unsigned int kept = mantissa >> shift, rest = mantissa & ((1u << shift) - 1), middle = 1u << (shift - 1);
    kept += rest > middle || (rest == middle && (kept & 1));
    return (unsigned short)(sign | kept);
}
