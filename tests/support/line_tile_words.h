// Room that LinesToTiles takes.
#pragma once

#include <cstdint>

namespace spl::test {

// 64-bit words of a row tile in LineVisibility::tiles.
inline int32_t LineTileWords(int32_t num_keys) { return (num_keys + 64 * 64 - 1) / (64 * 64); }

}  // namespace spl::test
