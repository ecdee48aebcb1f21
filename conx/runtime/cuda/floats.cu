// Conversions between floats, as bits: the format's one rounding (spec/conx.md, Values). conx/codecs/convert.py does
// the same in NumPy. To nearest, ties to even; finite values beyond the target's range become its largest finite one,
// infinities stay, a NaN becomes the quiet NaN of its sign.

enum Kind { F64, F32, F16, BF16 };

template <int K> struct Bits { typedef u16 type; };
template <> struct Bits<F64> { typedef u64 type; };
template <> struct Bits<F32> { typedef u32 type; };

DEVICE u32 float32_to_float16(float value) {
    u32 bits = bits_of(value), magnitude = bits & 0x7FFFFFFF, sign = bits >> 16 & 0x8000;
    if (magnitude > 0x7F800000) return sign | 0x7E00;
    if (magnitude >= 0x477FF000 && magnitude != 0x7F800000) return sign | 0x7BFF;  // would round to infinity
    return half_of(value);
}

DEVICE u32 float32_to_bfloat16(float value) {
    u32 bits = bits_of(value), magnitude = bits & 0x7FFFFFFF, sign = bits >> 16 & 0x8000;
    if (magnitude > 0x7F800000) return sign | 0x7FC0;
    if (magnitude >= 0x7F7F8000 && magnitude != 0x7F800000) return sign | 0x7F7F;
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

// To float32 so that a further rounding to at most 22 bits gives what one rounding would: to nearest, and then, where
// anything was lost and the last bit is even, to the odd neighbour on the value's side. Boldo and Melquiond, "Emulation
// of FMA and correctly rounded sums", IEEE Trans. Computers 57(4), 2008, section 3.
DEVICE float rounded_to_odd(double value) {
    float single = (float)value;
    double back = (double)single, lost = (value < 0 ? -value : value) - (back < 0 ? -back : back);
    u32 bits = bits_of(single);
    if (!(bits & 1) && lost > 0) ++bits;
    if (!(bits & 1) && lost < 0) --bits;
    return float_of(bits);
}

// float16 to float32. The exponent is put where float32 has it and mended by a multiplication, which is exact for
// subnormal numbers too; the mantissa of a NaN is moved as it is.
DEVICE u32 widen_float16(u32 half) {
    u32 bits = (half & 0x8000) << 16 | (half & 0x7FFF) << 13;
    if ((half & 0x7C00) == 0x7C00) return bits | 0x7F800000;
    return bits_of(float_of(bits) * 0x1p112f);
}

DEVICE u32 quieted(u32 bits) { return (bits & 0x7FFFFFFF) > 0x7F800000 ? (bits & 0x80000000) | 0x7FC00000 : bits; }

DEVICE u32 to_float32(u64 bits, Kind source) {
    if (source == F16) return widen_float16((u32)bits);
    if (source == BF16) return (u32)bits << 16;
    if (source == F32) return (u32)bits;
    double value = double_of(bits);
    u32 single = bits_of((float)value);
    bool finite = (bits & 0x7FF0000000000000ULL) != 0x7FF0000000000000ULL;
    if (finite && (single & 0x7FFFFFFF) == 0x7F800000) --single;  // the largest finite float32
    if (value != value) single = (u32)(bits >> 32 & 0x80000000) | 0x7FC00000;
    return single;
}

// The bits of type T for the bits of type S. `exact` is set where a value was stored narrower than its own type, which
// is T: then NaNs keep their bits.
template <int S, int T> DEVICE u32 converted(u64 bits, bool exact) {
    if (S == T) return (u32)bits;
    if (T == F32) {
        u32 wide = to_float32(bits, (Kind)S);
        return exact ? wide : quieted(wide);
    }
    float value;
    if (S == F64 && (bits & 0x7FF0000000000000ULL) != 0x7FF0000000000000ULL)
        value = rounded_to_odd(double_of(bits));
    else
        value = float_of(to_float32(bits, (Kind)S));
    return T == F16 ? float32_to_float16(value) : float32_to_bfloat16(value);
}
