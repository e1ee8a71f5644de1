// How every part of muGPT reports a failure: an exception whose text is the one line the user sees.
#pragma once

#include <stdexcept>

// A failure that ends the program: bad input, a file that cannot be read, memory that is not there.
// `main` prints what() as one line on stderr and exits with status 1.
struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Throws Error with a printf-formatted message. Name the flag or file and the offending value in it.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
