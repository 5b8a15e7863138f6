// Quantises rows of keys or values to 8-bit codes with one scale.
#pragma once

#include "kernels.h"

namespace specmemo {

// scale = the row's largest magnitude / 127 (int8) or / 448 (fp8), codes = elements / scale, rounded to nearest even.
// If the scale is below the smallest normal float, the row becomes zeros. NaN and infinity are kept in the scale.
// Bit-identical with the other backends.
float quantise_row(DType dtype, KVType type, const char* row, int64_t dim, uint8_t* codes);

}  // namespace specmemo
