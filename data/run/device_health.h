/*
The health of a rank's device and links, as far as the driver reports it: clocks, the reasons why they are
held down, power, and errors of memory and links. A device that is slow or about to fail often shows it here
first.

GPUs are queried through NVML, the driver's library, which is loaded at run time because it may be missing.
CPU clocks and the errors of network links are read from files under /sys. Errors are counted from the start
of the run.
*/
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <dlfcn.h>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "data/base/error.h"
#include "data/base/figures.h"  // counted
#include "data/base/strings.h"  // joined

// ----------------------------------------------------------------------------
// NVML: the part of its interface that is used here, as documented

class Nvml {
public:
    using Find = std::function<void*(const char* symbol)>;

    // bus: the GPU's PCI bus ID; empty: no GPU.
    explicit Nvml(const std::string& bus, const Find& find) {
        if (bus.empty()) return;
        auto init = (int (*)())find("nvmlInit_v2");
        auto by_bus = (int (*)(const char*, void**))find("nvmlDeviceGetHandleByPciBusId_v2");
        if (!init || !by_bus || init() != 0 || by_bus(bus.c_str(), &device_) != 0) return;
        clock_ = (decltype(clock_))find("nvmlDeviceGetClockInfo");
        power_ = (decltype(power_))find("nvmlDeviceGetPowerUsage");
        temperature_ = (decltype(temperature_))find("nvmlDeviceGetTemperature");
        reasons_ = (decltype(reasons_))find("nvmlDeviceGetCurrentClocksThrottleReasons");
        ecc_ = (decltype(ecc_))find("nvmlDeviceGetTotalEccErrors");
        link_errors_ = (decltype(link_errors_))find("nvmlDeviceGetNvLinkErrorCounter");
        wait_ = (decltype(wait_))find("nvmlEventSetWait_v2");
        auto make_set = (int (*)(void**))find("nvmlEventSetCreate");
        auto watch = (int (*)(void*, unsigned long long, void*))find("nvmlDeviceRegisterEvents");
        constexpr unsigned long long critical_xid = 8;
        if (wait_ && make_set && watch && make_set(&events_) == 0 &&
            watch(device_, critical_xid, events_) != 0)
            events_ = nullptr;
    }

    // Returns a function that looks up symbols in this machine's driver library; without one, it finds none.
    static Find of_driver() {
        void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
        return [library](const char* symbol) { return library ? dlsym(library, symbol) : nullptr; };
    }

    void read(nlohmann::ordered_json& now, std::map<std::string, uint64_t>& errors) {
        unsigned value = 0;
        unsigned long long count = 0;
        constexpr int sm_clock = 1, gpu_sensor = 0, since_boot = 0, corrected = 0, uncorrected = 1;
        if (clock_ && clock_(device_, sm_clock, &value) == 0) now["sm_clock_mhz"] = value;
        if (power_ && power_(device_, &value) == 0) now["power_w"] = value / 1e3;
        if (temperature_ && temperature_(device_, gpu_sensor, &value) == 0) now["temperature_c"] = value;
        if (reasons_ && reasons_(device_, &count) == 0) now["throttled"] = reasons_text(count);
        if (ecc_ && ecc_(device_, corrected, since_boot, &count) == 0) errors["ecc_corrected"] = count;
        if (ecc_ && ecc_(device_, uncorrected, since_boot, &count) == 0) errors["ecc_uncorrected"] = count;
        constexpr int most_links = 18, kinds_of_errors = 4;
        for (int link = 0; link_errors_ && link < most_links; link++) {
            for (int kind = 0; kind < kinds_of_errors; kind++)
                if (link_errors_(device_, link, kind, &count) == 0) errors["link_errors"] += count;
        }
        for (Event event; events_ && wait_(events_, &event, 0) == 0;) {
            last_xid_ = event.data;
            xids_++;
        }
        if (events_) errors["xids"] = xids_;
        if (last_xid_) now["xid"] = last_xid_;
    }

private:
    struct Event {  // nvmlEventData_t
        void* device;
        unsigned long long type, data;
        unsigned instance, compute_instance;
    };

    // Returns the reasons why the clocks are held down; empty if they are not.
    static std::string reasons_text(unsigned long long reasons) {
        const struct {
            unsigned long long bit;
            const char* name;
        } table[] = {{0x4, "power cap"},
                     {0x8, "hardware slowdown"},
                     {0x20, "temperature"},
                     {0x40, "temperature (hardware)"},
                     {0x80, "power brake"}};
        std::string names;
        for (auto& [bit, name] : table)
            if (reasons & bit) append_item(names, name);
        return names;
    }

    void* device_ = nullptr;
    void* events_ = nullptr;
    unsigned long long last_xid_ = 0;
    uint64_t xids_ = 0;
    int (*clock_)(void*, int, unsigned*) = nullptr;
    int (*power_)(void*, unsigned*) = nullptr;
    int (*temperature_)(void*, int, unsigned*) = nullptr;
    int (*reasons_)(void*, unsigned long long*) = nullptr;
    int (*ecc_)(void*, int, int, unsigned long long*) = nullptr;
    int (*link_errors_)(void*, unsigned, int, unsigned long long*) = nullptr;
    int (*wait_)(void*, Event*, unsigned) = nullptr;
};

// ----------------------------------------------------------------------------
// a rank's health

class DeviceHealth {
public:
    // linux_files: the root of the sysfs tree.
    explicit DeviceHealth(const std::string& bus, const Nvml::Find& find = Nvml::of_driver(),
                          std::string linux_files = "/sys")
        : nvml_(bus, find), files_(std::move(linux_files)) {
        nlohmann::ordered_json ignored;
        read_all(ignored, at_start_);
    }

    // Returns the current values by name, with errors counted since the start of the run; empty if none can
    // be read.
    nlohmann::ordered_json read() {
        nlohmann::ordered_json now = nlohmann::ordered_json::object();
        std::map<std::string, uint64_t> errors;
        read_all(now, errors);
        for (auto& [name, count] : errors) now[name] = count - std::min(count, at_start_[name]);
        return now;
    }

    // Returns the changes since the previous reading that a person should know about; empty if none.
    static std::string alarm(const nlohmann::ordered_json& before, const nlohmann::ordered_json& now) {
        std::vector<std::string> news;
        const nlohmann::ordered_json was = before.is_object() ? before : nlohmann::ordered_json::object();
        auto rise = [&](const char* name) {
            uint64_t count = now.value(name, uint64_t(0));
            return count - std::min(count, was.value(name, uint64_t(0)));
        };
        auto add_errors = [&](const char* name, const char* kind, const std::string& of) {
            uint64_t more = rise(name);
            if (more) news.push_back(counted(more, kind) + of);
        };
        add_errors("xids", "critical driver error",
                   text(", the last one XID %llu", (unsigned long long)now.value("xid", 0ull)));
        add_errors("ecc_uncorrected", "uncorrected memory error", "");
        add_errors("link_errors", "link error", "");
        std::string throttled = now.value("throttled", "");
        if (throttled != was.value("throttled", "") && !throttled.empty())
            news.push_back("its clocks are throttled by " + throttled);
        if (rise("cpu_throttled")) news.push_back("its processor was too hot");
        return joined(news);
    }

private:
    void read_all(nlohmann::ordered_json& now, std::map<std::string, uint64_t>& errors) {
        nvml_.read(now, errors);
        namespace fs = std::filesystem;
        for (const fs::path& card : files_in(files_ + "/class/infiniband")) {
            for (const fs::path& port : files_in(card / "ports")) {
                for (const char* name :
                     {"symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors"}) {
                    if (auto count = number_in(port / "counters" / name)) errors["link_errors"] += *count;
                }
            }
        }
        double clocks = 0;
        int cores = 0;
        std::map<uint64_t, uint64_t> throttled;  // by CPU package: all cores of one report the same count
        for (const fs::path& core : files_in(files_ + "/devices/system/cpu")) {
            std::string name = core.filename();
            if (!name.starts_with("cpu") || name.find_first_not_of("0123456789", 3) != name.npos) continue;
            if (auto clock = number_in(core / "cpufreq/scaling_cur_freq"))
                clocks += (double)*clock / 1e3, cores++;
            auto count = number_in(core / "thermal_throttle/package_throttle_count");
            if (count) throttled[number_in(core / "topology/physical_package_id").value_or(0)] = *count;
        }
        if (cores) now["cpu_clock_mhz"] = (int)(clocks / cores);
        for (auto& [processor, count] : throttled) errors["cpu_throttled"] += count;
    }

    static std::vector<std::filesystem::path> files_in(const std::filesystem::path& folder) {
        std::vector<std::filesystem::path> files;
        std::error_code error;
        for (std::filesystem::directory_iterator file(folder, error), end; !error && file != end;
             file.increment(error))
            files.push_back(file->path());
        return files;
    }

    static std::optional<uint64_t> number_in(const std::filesystem::path& file) {
        uint64_t number;
        if (std::ifstream(file) >> number) return number;
        return {};
    }

    Nvml nvml_;
    const std::string files_;
    std::map<std::string, uint64_t> at_start_;  // error counts
};
