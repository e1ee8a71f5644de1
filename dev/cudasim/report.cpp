// Faults: one line that says where, a stack trace, and abort().
#include <execinfo.h>
#include <sanitizer/common_interface_defs.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "internal.h"

namespace cudasim {
namespace {

// "layernorm_kernel<float>" from "void (anonymous namespace)::layernorm_kernel<float>(float*, ...)".
std::string plain_name(std::string function) {
    const std::string unnamed = "(anonymous namespace)::";
    for (size_t at; (at = function.find(unnamed)) != std::string::npos;) function.erase(at, unnamed.size());
    const std::string name = function.substr(0, function.find('('));
    return name.rfind("void ", 0) == 0 ? name.substr(5) : name;
}

// Who is running: a CUDA thread, an operation of a stream, or host code.
std::string describe_running() {
    const Thread* thread = running();
    if (thread == nullptr) return "host";
    const uint3 &b = blockIdx, &t = thread->index;
    char text[100];
    snprintf(text, sizeof(text), ", block (%u,%u,%u), thread (%u,%u,%u)", b.x, b.y, b.z, t.x, t.y, t.z);
    return "kernel " + kernel_name(thread->block->launch->kernel) + text;
}

// What stands at an instruction, as "function|file:line|file", the innermost of inlined functions first.
std::vector<std::string> symbolize(const void* instruction) {
    char text[8000];
    __sanitizer_symbolize_pc(const_cast<void*>(instruction), "%f|%S|%s", text, sizeof(text));
    std::vector<std::string> functions;
    for (const char* next = text; *next != '\0'; next += functions.back().size() + 1)
        functions.emplace_back(next);
    return functions;
}

// The calls that led here from the kernel, or from main: without the simulator's own and libraries'.
void print_trace() {
    void* frames[64];
    const int count = backtrace(frames, 64);
    const Thread* thread = running();
    const std::string last = thread == nullptr ? "main" : kernel_name(thread->block->launch->kernel);
    for (int i = 0; i < count; ++i) {
        for (const std::string& line : symbolize(frames[i])) {
            const size_t place = line.find('|'), file = line.rfind('|');
            const std::string function = line.substr(0, place);
            const bool skip = line.find("dev/cudasim/", file) != std::string::npos ||
                              line.find("libsanitizer", file) != std::string::npos ||
                              line.find("<null>", file) != std::string::npos || line[file + 1] == '/';
            if (!skip) {
                fprintf(stderr, "    in %s, %s\n", function.c_str(),
                        line.substr(place + 1, file - place - 1).c_str());
            }
            if (plain_name(function) == last) return;
        }
    }
}

[[noreturn]] void print_and_abort(const std::string& place, const char* format, va_list args) {
    fprintf(stderr, "cudasim: %s: ", (describe_running() + place).c_str());
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    print_trace();
    abort();
}

}  // namespace

// The symbolizer looks up the instruction before the address it gets.
std::string kernel_name(const void* kernel) {
    const std::vector<std::string> functions = symbolize(static_cast<const char*>(kernel) + 1);
    return functions.empty() ? "?" : plain_name(functions.back().substr(0, functions.back().find('|')));
}

void fault(const char* format, ...) {
    va_list args;
    va_start(args, format);
    print_and_abort("", format, args);
}

void fault_at(Where where, const char* format, ...) {
    va_list args;
    va_start(args, format);
    print_and_abort(std::string(", ") + where.file_name() + ":" + std::to_string(where.line()), format, args);
}

}  // namespace cudasim

// The sanitizers call these when they report something: the line that says which CUDA thread it was.
extern "C" {
void __asan_on_error() {
    fprintf(stderr, "cudasim: %s: AddressSanitizer found an error:\n", cudasim::describe_running().c_str());
}
void __ubsan_on_report() {
    fprintf(stderr, "cudasim: %s: UndefinedBehaviorSanitizer found an error:\n",
            cudasim::describe_running().c_str());
}
}
