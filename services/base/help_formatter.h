// How --help of every program looks.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

namespace spl {

// In this order: options of which one must be given (option groups), groups of options in the order in which they were
// added, and last the group that has nothing but --help. Descriptions are wrapped. A type stands once: "{a,b}" and not
// "TEXT:{a,b}". Subcommands inherit the formatter of an app that has it when they are added.
class HelpFormatter : public CLI::Formatter {
 public:
  // Lines have at most `width` columns, or 40 if that is less; only words without a space are longer.
  explicit HelpFormatter(size_t width);

  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode mode) const override;
  std::string make_subcommand(const CLI::App* app) const override;
  std::string make_option(const CLI::Option* option, bool is_positional) const override;
  std::string make_option_opts(const CLI::Option* option) const override;

 private:
  std::string OptionsOf(const CLI::App& app) const;
  std::string SubcommandsOf(const CLI::App& app) const;
  std::string Entry(const std::string& name, const std::string& description) const;

  const size_t width_;
};

// A formatter for the window of standard output, from 60 to 110 columns; 100 where that is no terminal.
std::shared_ptr<HelpFormatter> MakeHelpFormatter();

}  // namespace spl
