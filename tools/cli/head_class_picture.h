// Head classes to look at: a table for the terminal, a layer × head picture as SVG.
#pragma once

#include <string>

#include "services/engine/model/head_classes.h"

namespace spl::cli {

// One line a layer: G for a global head and . for a local one, with its need (the larger of the two measures) where the
// map has a profile.
std::string HeadClassTable(const engine::HeadClassMap& map);

// Self-contained. A cell's colour is its need, its frame says global; the tooltip has the numbers.
std::string HeadClassSvg(const engine::HeadClassMap& map, const std::string& title);

}  // namespace spl::cli
