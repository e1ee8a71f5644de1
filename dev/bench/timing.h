// Clocks and medians for the benchmarks, and how much of the machine other processes took meanwhile.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <ctime>
#include <vector>

inline double now_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Seconds that `work` takes, called `calls` times, by the clock that is given.
template <typename Work>
double seconds_of(const Work& work, size_t calls = 1, double (*clock)() = now_seconds) {
    const double start = clock();
    for (size_t i = 0; i < calls; i++) work();
    return clock() - start;
}

// Seconds of CPU time of this process, all threads together. One thread's work is timed well by it even where
// other processes take the machine in turns.
inline double cpu_seconds() {
    timespec time{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// The upper of the two in the middle, of an even number.
inline double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

// Seconds of CPU time that all processes of this machine have used (Linux), and this one's.
struct CpuTime {
    double all = 0, own = 0;
};

inline CpuTime cpu_time() {
    CpuTime time;
    time.own = cpu_seconds();
    if (FILE* file =
            fopen("/proc/stat", "r")) {  // in hundredths: user nice system idle iowait irq softirq steal
        unsigned long long t[8] = {};
        if (fscanf(file, "cpu %llu %llu %llu %llu %llu %llu %llu %llu", &t[0], &t[1], &t[2], &t[3], &t[4],
                   &t[5], &t[6], &t[7]) == 8)
            time.all = 0.01 * static_cast<double>(t[0] + t[1] + t[2] + t[5] + t[6] + t[7]);
        fclose(file);
    }
    return time;
}

// How many cores others kept busy from `before` to `after`, `seconds` apart. Good to 0.02 over a second.
inline double foreign_cores(const CpuTime& before, const CpuTime& after, double seconds) {
    return std::max(0.0, (after.all - before.all) - (after.own - before.own)) / seconds;
}
