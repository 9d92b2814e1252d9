// The two functions of LZ4 that Verilator's FST writer calls, for systems without LZ4's headers.
//
// A block of the LZ4 format may consist of literals alone (LZ4 block format, "end of block conditions"):
// one token whose high half is the length, further length bytes where it is 15 or more, then the bytes.
// That is valid for every reader; it only does not make the hierarchy section smaller.
#pragma once

#include <cstring>

inline int LZ4_compressBound(int size) { return size + size / 255 + 16; }

inline int LZ4_compress_default(const char* source, char* target, int size, int capacity) {
    if (size < 0 || capacity < LZ4_compressBound(size)) return 0;
    char* out = target;
    *out++ = static_cast<char>((size < 15 ? size : 15) << 4);
    if (size >= 15) {
        int rest = size - 15;
        for (; rest >= 255; rest -= 255) *out++ = static_cast<char>(255);
        *out++ = static_cast<char>(rest);
    }
    std::memcpy(out, source, static_cast<size_t>(size));
    return static_cast<int>(out - target) + size;
}
