#include "tools/cli/text_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace spl::cli {
namespace {

constexpr size_t kGap = 2;  // between two columns

bool BeginsCharacter(char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }

std::string Padded(const std::string& text, size_t columns, bool right) {
  const std::string space(columns - std::min(columns, TextColumns(text)), ' ');
  return right ? space + text : text + space;
}

}  // namespace

size_t TextColumns(std::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), BeginsCharacter));
}

std::string CutText(std::string_view text, size_t columns) {
  if (TextColumns(text) <= columns) return std::string(text);
  if (columns == 0) return "";
  size_t end = 0, seen = 0;
  for (; end < text.size(); ++end) {
    if (BeginsCharacter(text[end]) && seen++ == columns - 1) break;
  }
  return std::string(text.substr(0, end)) + "~";
}

std::vector<std::string> TextTable::Lines(size_t width, size_t most_rows) const {
  // A line is needed for the rows that are left out.
  const bool all = rows_.size() <= most_rows;
  const size_t shown = all ? rows_.size() : most_rows - std::min<size_t>(most_rows, 1);
  std::vector<size_t> widths(columns_.size());
  for (size_t c = 0; c < columns_.size(); ++c) {
    widths[c] = TextColumns(columns_[c].title);
    for (size_t r = 0; r < shown; ++r) widths[c] = std::max(widths[c], TextColumns(rows_[r][c]));
  }
  std::vector<bool> kept(columns_.size(), true);
  const auto total = [&] {
    size_t sum = 0;
    for (size_t c = 0; c < widths.size(); ++c) sum += kept[c] ? widths[c] + kGap : 0;
    return sum - std::min(sum, kGap);
  };
  const auto too_wide = [&] { return width != 0 && total() > width; };
  for (size_t c = 0; c < columns_.size() && too_wide(); ++c) {
    if (columns_[c].short_columns != 0)
      widths[c] = std::min(widths[c], std::max(columns_[c].short_columns, TextColumns(columns_[c].title)));
  }
  while (too_wide()) {
    size_t worst = columns_.size();
    for (size_t c = 0; c < columns_.size(); ++c) {
      if (kept[c] && columns_[c].drop > (worst == columns_.size() ? 0 : columns_[worst].drop)) worst = c;
    }
    if (worst == columns_.size()) break;
    kept[worst] = false;
  }
  const auto line_of = [&](const auto& cell) {
    std::string line;
    bool first = true;
    for (size_t c = 0; c < columns_.size(); ++c) {
      if (!kept[c]) continue;
      line += (first ? "" : std::string(kGap, ' ')) + Padded(CutText(cell(c), widths[c]), widths[c], columns_[c].right);
      first = false;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    return width == 0 ? line : CutText(line, width);
  };
  std::vector<std::string> lines = {line_of([&](size_t c) { return columns_[c].title; })};
  for (size_t r = 0; r < shown; ++r) lines.push_back(line_of([&](size_t c) { return rows_[r][c]; }));
  if (!all && most_rows > 0)
    lines.push_back(CutText(fmt::format("and {} more", rows_.size() - shown), width == 0 ? SIZE_MAX : width));
  return lines;
}

}  // namespace spl::cli
