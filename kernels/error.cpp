// Formats the one line of a failure; see error.h.
#include "kernels/error.h"

#include <cstdarg>
#include <cstdio>
#include <string>

void fail(const char* format, ...) {
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    std::string text(static_cast<size_t>(vsnprintf(nullptr, 0, format, args)), '\0');
    vsnprintf(text.data(), text.size() + 1, format, again);
    va_end(again);
    va_end(args);
    throw Error(text);
}
