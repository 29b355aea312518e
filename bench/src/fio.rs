//! Runs fio and returns the throughput of one kind of reads.

use std::path::Path;

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::measure::drop_caches;
use crate::command::{append, cmd};
use rig::process::quiet;

/// One kind of reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Job {
    /// Column title.
    pub(super) title: &'static str,
    /// fio's I/O engine: `psync` or `mmap`.
    pub(super) engine: &'static str,
    /// Block size in fio's notation, such as `4k`.
    pub(super) block: &'static str,
    /// Number of processes. Each reads its part of the file sequentially, or all of it at random.
    pub(super) jobs: u64,
    pub(super) order: Order,
    pub(super) is_cold: bool,
    /// Whether the program advises the kernel of its access pattern.
    pub(super) advice: Advice,
}

/// Order of the reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    Sequential,
    /// This many bytes in total, at the same offsets in every run.
    Random(u64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Advice {
    None,
    /// By `posix_fadvise`.
    Given,
}

/// The data that is read.
#[derive(Debug, Clone, Copy)]
pub(super) enum What<'a> {
    /// A file with its size in bytes.
    File(&'a Path, u64),
    /// All files of a folder, in random order.
    Folder(&'a Path),
}

impl Job {
    /// Runs the job and returns bytes per second.
    pub(super) fn run(&self, what: What<'_>, work: &Path) -> Result<u64> {
        if self.is_cold {
            drop_caches()?;
        }
        let Self { engine, block, .. } = self;
        let jobs = self.jobs.to_string();
        let advice = if self.advice == Advice::Given { "1" } else { "0" };
        let kind = if self.order == Order::Sequential { "read" } else { "randread" };
        let mut fio = cmd!(
            "fio --name=read --readonly --output-format=json --group_reporting",
            "--invalidate=0 --norandommap --randrepeat=1 --allrandrepeat=1 --ioengine={engine}",
            "--bs={block} --numjobs={jobs} --fadvise_hint={advice} --rw={kind}"
        );
        match (what, self.order) {
            (What::File(file, bytes), Order::Sequential) => {
                let part = (bytes / self.jobs).to_string();
                append!(fio, "--filename {file} --size={part} --offset_increment={part}");
            }
            (What::File(file, bytes), Order::Random(_)) => {
                let bytes = bytes.to_string();
                append!(fio, "--filename {file} --size={bytes}");
            }
            (What::Folder(folder), _) => {
                append!(fio, "--opendir {folder} --file_service_type=random:1");
            }
        }
        if let Order::Random(bytes) = self.order {
            fio.arg(format!("--io_size={}", bytes / self.jobs));
        }
        let text = quiet(fio.current_dir(work))?;
        // fio may print messages before the JSON.
        let json = text.find('{').map_or("", |at| &text[at..]);
        let answer: Value = serde_json::from_str(json).context("fio gave no JSON")?;
        let read = &answer["jobs"][0]["read"];
        read["bw_bytes"].as_u64().filter(|it| *it > 0).context("fio read nothing")
    }
}
