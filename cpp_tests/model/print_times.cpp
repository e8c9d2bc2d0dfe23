// kernel_times PAGE: writes the tables of PAGE, which is docs/kernel_model.md.
#include <exception>
#include <fstream>
#include <iostream>
#include <sstream>
#include <stdexcept>

#include "model/times_tables.h"

int main(int count, char** arguments) {
  if (count != 2) {
    std::cerr << "usage: kernel_times docs/kernel_model.md\n";
    return 2;
  }
  std::ifstream file(arguments[1]);
  std::stringstream page;
  page << file.rdbuf();
  try {
    if (!file) throw std::runtime_error("cannot be read");
    const std::string text = axonn::times::with_tables(page.str(), /*slow_ones=*/true);
    if (!(std::ofstream(arguments[1]) << text << std::flush)) {
      throw std::runtime_error("cannot be written");
    }
  } catch (const std::exception& error) {
    std::cerr << "kernel_times: " << arguments[1] << ": " << error.what() << '\n';
    return 1;
  }
  return 0;
}
