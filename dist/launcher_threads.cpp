// Ranks as threads of this process, for the simulator: its devices are all in one process. A rank that fails
// ends the process (comm_abort), and so all of them.
#include "dist/launcher.h"

#include <unistd.h>

#include <algorithm>
#include <thread>

#include "dist/sockets.h"

int launch_ranks(int ranks, const std::vector<std::string>& arguments,
                 int (*run)(const RankEnvironment& environment, const std::vector<std::string>& arguments),
                 void (*)(const std::string& line)) {
    RankEnvironment environment;
    environment.ranks = environment.local_ranks = ranks;
    environment.node = 0;
    environment.listening_socket = listen_at(environment.address, 0);
    environment.port = listening_port(environment.listening_socket);
    std::vector<int> statuses(static_cast<size_t>(ranks));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; rank++) {
        environment.rank = environment.local_rank = rank;
        threads.emplace_back([&arguments, &statuses, run, environment] {
            statuses[static_cast<size_t>(environment.rank)] = run(environment, arguments);
        });
        environment.listening_socket = -1;  // it is rank 0's, which closes it
    }
    for (std::thread& thread : threads) thread.join();
    return *std::max_element(statuses.begin(), statuses.end());
}
