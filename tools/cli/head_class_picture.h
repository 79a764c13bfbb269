// Shows head classes: as a table for the terminal, and as a layer × head picture in SVG.
#pragma once

#include <string>

#include "services/engine/model/head_classes.h"

namespace spl::cli {

// One line per layer: G for a global head, . for a local one. With a profile, each has its need, the larger of the two
// measures.
std::string HeadClassTable(const engine::HeadClassMap& map);

// A self-contained picture. A cell's colour shows its need, a red frame a global head; the tooltip has the numbers.
std::string HeadClassSvg(const engine::HeadClassMap& map, const std::string& title);

}  // namespace spl::cli
