/*
Fits the constants of the planner to published step times, and reports how well it predicts them.

    calibrate_planner      (make calibrate-planner)

Every constant has an expected value, from data sheets and counts, and a width: how far off that may be. Every
publication has a factor for its software. The most probable values minimize the sum of squares of the errors
of runs, constants and factors, each relative to its width. The fitted values are those of kernels/cards.h.
Then each publication is left out in turn, and predicted with factor 1 from a fit to the others. An error
beyond its limit is reported and sets the exit code to 1.
*/
#include "test/comm/published_runs.h"

namespace {

// A constant that is fitted. set() scales a property of the machine by the value, or sets it to the value.
struct Constant {
    const char* name;
    double expected, width;  // normal distribution of its logarithm
    void (*set)(Machine& machine, double value, bool is_a100);
};

const Constant constants[] = {
    {"product share of the A100", 0.78, 0.04,
     [](Machine& m, double value, bool is_a100) {
         if (is_a100) m.set_gemm_flops(value * m.flops, with_mma);
     }},
    {"half_sums", 110, 0.5, [](Machine& m, double value, bool) { m.gemm_half_k = value; }},
    {"link_share", 0.80, 0.06,
     [](Machine& m, double value, bool) { m.node_bandwidth = value * m.link_rate; }},
    {"network_share", 0.90, 0.06, [](Machine& m, double value, bool) { m.network *= value / network_share; }},
    {"launch", 2.5e-6, 0.3, [](Machine& m, double value, bool) { m.launch = value; }},
    {"bytes_of_score", 13, 0.2, [](Machine&, double, bool) {}},  // a property of the program, not the machine
};
constexpr size_t count = std::size(constants);
constexpr size_t of_score = count - 1;
constexpr double width_of_run = 0.045, width_of_factor = 0.06;
constexpr double of_fourth = 0.1;  // weight of fourth powers of errors, which keep every single error small

constexpr double most_of_median = 4.5, most_left_out = 7;  // percent

using Values = std::vector<double>;  // logarithms

struct Calibration {
    PublishedRuns all = published_runs();

    std::vector<size_t> where(auto&& takes) const {
        std::vector<size_t> chosen;
        for (size_t i = 0; i < all.runs.size(); i++)
            if (takes(all.runs[i].publication)) chosen.push_back(i);
        return chosen;
    }
    Machine machine(const Publication& publication, const Values& values) const {
        Machine machine = find_machine(publication.machine);
        for (size_t i = 0; i < count; i++)
            constants[i].set(machine, std::exp(values[i]), publication.machine.starts_with("a100"));
        return machine;
    }
    double predicted(size_t i, const Values& values) const {
        const Publication& publication = all.publications[all.runs[i].publication];
        return predicted_seconds(all.runs[i], publication, machine(publication, values),
                                 std::exp(values[of_score]));
    }
    Values errors(const std::vector<size_t>& runs, const Values& values) const {
        Values errors;
        for (size_t i : runs) errors.push_back(log_error(all.runs[i], predicted(i, values)));
        return errors;
    }
    // Returns for each publication the factor that minimizes the sum, which has a single minimum.
    Values factors(const std::vector<size_t>& runs, const Values& errors) const {
        constexpr int halvings = 40;
        Values factors;
        for (int p = 0; p < (int)all.publications.size(); p++) {
            auto slope = [&](double factor) {
                double sum = 2 * factor / std::pow(width_of_factor, 2);
                for (size_t k = 0; k < runs.size(); k++) {
                    double off = (errors[k] - factor) / width_of_run;
                    if (all.runs[runs[k]].publication == p)
                        sum -= (2 * off + 4 * of_fourth * off * off * off) / width_of_run;
                }
                return sum;
            };
            double low = -1, high = 1;
            for (int i = 0; i < halvings; i++) (slope((low + high) / 2) < 0 ? low : high) = (low + high) / 2;
            factors.push_back(low);
        }
        return factors;
    }
    double squares(const std::vector<size_t>& runs, const Values& values) const {
        Values errors = this->errors(runs, values), factors = this->factors(runs, errors);
        double sum = 0;
        for (size_t k = 0; k < runs.size(); k++) {
            double off = (errors[k] - factors[all.runs[runs[k]].publication]) / width_of_run;
            sum += off * off + of_fourth * off * off * off * off;
        }
        for (double factor : factors) sum += std::pow(factor / width_of_factor, 2);
        for (size_t i = 0; i < count; i++)
            sum += std::pow((values[i] - std::log(constants[i].expected)) / constants[i].width, 2);
        return sum;
    }
    // Searches along each constant in turn; steps grow if they help and shrink if they do not.
    Values fit(const std::vector<size_t>& runs) const {
        constexpr int rounds = 14;
        Values values, steps;
        for (const Constant& one : constants)
            values.push_back(std::log(one.expected)), steps.push_back(one.width);
        double least = squares(runs, values);
        for (int round = 0; round < rounds; round++) {
            for (size_t i = 0; i < count; i++) {
                bool helps = false;
                for (double sign : {1.0, -1.0}) {
                    Values tried = values;
                    tried[i] += sign * steps[i];
                    double sum = squares(runs, tried);
                    if (sum >= least) continue;
                    least = sum, values = tried, helps = true;
                    break;
                }
                steps[i] *= helps ? 1.5 : 0.5;
            }
        }
        return values;
    }
};

double percent(double log_error) {
    return 100 * std::abs(std::expm1(log_error));
}
double median(Values values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

}  // namespace

int main(int, char**) try {
    Calibration c;
    std::vector<size_t> runs = c.where([](int) { return true; });
    Values values = c.fit(runs), factors = c.factors(runs, c.errors(runs, values)), off;
    printf("%-28s %10s %10s\n", "constant", "expected", "fitted");
    for (size_t i = 0; i < count; i++)
        printf("%-28s %10.3g %10.3g\n", constants[i].name, constants[i].expected, std::exp(values[i]));
    printf("\n%-28s %10s\n", "publication", "factor");
    for (size_t p = 0; p < factors.size(); p++)
        printf("%-28s %10.3f\n", c.all.publications[p].name.c_str(), std::exp(-factors[p]));
    printf("\n%-18s %-18s %10s %10s %8s\n", "", "", "published", "predicted", "error");
    for (size_t i : runs) {
        const PublishedRun& run = c.all.runs[i];
        double seconds = c.predicted(i, values) * std::exp(-factors[run.publication]);
        off.push_back(percent(log_error(run, seconds)));
        printf("%-18s %-18s %8.2f s %8.2f s %+7.1f%%\n", c.all.publications[run.publication].name.c_str(),
               run.name.c_str(), run.seconds, seconds, 100 * (seconds / run.seconds - 1));
    }
    printf("\nmedian %.1f%%, largest %.1f%%, beyond what the reading of plots explains\n\n", median(off),
           *std::max_element(off.begin(), off.end()));

    Values of_all;
    for (int left_out = 0; left_out < (int)c.all.publications.size(); left_out++) {
        Values fitted = c.fit(c.where([&](int p) { return p != left_out; })), of_one;
        for (size_t i : c.where([&](int p) { return p == left_out; }))
            of_one.push_back(percent(log_error(c.all.runs[i], c.predicted(i, fitted))));
        printf("%-18s predicted from the others, with factor 1: median %.1f%%, largest %.1f%%\n",
               c.all.publications[left_out].name.c_str(), median(of_one),
               *std::max_element(of_one.begin(), of_one.end()));
        of_all.insert(of_all.end(), of_one.begin(), of_one.end());
    }
    printf("all that were left out: median %.1f%%\n", median(of_all));
    bool all_within = true;
    auto check = [&](const char* what, double percent, double most) {
        if (percent <= most) return;
        all_within = false;
        printf("FAILED: %s %.1f%%, and %.1f%% is the most\n", what, percent, most);
    };
    check("median of the fit", median(off), most_of_median);
    for (size_t k = 0; k < runs.size(); k++) {
        const PublishedRun& run = c.all.runs[runs[k]];
        check(run.name.c_str(), off[k], 100 * run.within);
    }
    check("median of what was left out", median(of_all), most_left_out);
    return all_within ? 0 : 1;
} catch (const Error& error) {
    fprintf(stderr, "train_gpt: %s\n", error.what());
    return 1;
}
