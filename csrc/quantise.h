// Rows of keys or values to 8-bit codes with one scale.
#pragma once

#include "kernels.h"

namespace specmemo {

// scale = the row's largest magnitude / 127 (int8) or / 448 (fp8), codes = elements / scale, rounded to nearest even.
// A row of nearly nothing (scale below the smallest normal float) becomes zeros; one with NaN or infinity keeps that in
// its scale. The same bits as the other backends write.
float quantise_row(DType dtype, KVType type, const char* row, int64_t dim, uint8_t* codes);

}  // namespace specmemo
