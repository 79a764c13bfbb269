// A table of text that fits a width: it drops columns that matter less.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace spl::cli {

// Number of columns that UTF-8 text takes on a terminal, one for each code point.
size_t TextColumns(std::string_view text);
// The first `columns` of it; with "~" as the last one where something is cut off. 0 columns: nothing.
std::string CutText(std::string_view text, size_t columns);

// One thread.
class TextTable {
 public:
  struct Column {
    std::string title;
    bool right = false;  // numbers
    // In which order columns go when the table is too wide: the highest first, 0 never.
    int drop = 0;
    // Most columns of a cell once the table is too wide, before any column goes; 0: it is not shortened.
    size_t short_columns = 0;
  };

  explicit TextTable(std::vector<Column> columns) : columns_(std::move(columns)) {}
  // REQUIRES: a cell for each column.
  void AddRow(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  size_t num_rows() const { return rows_.size(); }

  // Titles and at most `most_rows` rows; with more, the last line says how many are left out. Lines have at most
  // `width` columns; 0: as many as they need.
  std::vector<std::string> Lines(size_t width, size_t most_rows) const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace spl::cli
