// Text of the control API's answers, for `splice ctl`.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/cli/terminal.h"

namespace spl::cli {

// Answer of /control/v1/status.
std::vector<std::string> StatusLines(const nlohmann::json& status);
// Answer of /control/v1/workers. Width and rows as in TextTable::Lines.
std::vector<std::string> WorkerLines(const nlohmann::json& workers, size_t width, size_t most_rows);
// The list "active" or "recent" of /control/v1/requests.
std::vector<std::string> RequestLines(const nlohmann::json& requests, size_t width, size_t most_rows);

// Answer of /control/v1/quality.
std::vector<std::string> QualityLines(const nlohmann::json& quality);

// Everything on one screen: at most window.rows lines of at most window.columns columns. Rows are shared between the
// workers, the requests under way and those that have ended; a list that needs less leaves its rows to the next.
std::vector<std::string> TopLines(const nlohmann::json& status, const nlohmann::json& workers,
                                  const nlohmann::json& requests, WindowSize window);

}  // namespace spl::cli
