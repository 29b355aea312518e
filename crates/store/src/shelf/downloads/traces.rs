//! Traces: the parts of an image that programs read first. `blobs/IMAGE.traces` is a record. See
//! `docs/format/lazy-artifact.md`, "Traces".

use std::collections::BTreeSet;

use image::digest::Digest;
use image::lazy::hot::BLOCKS_OF_A_UNIT;
use image::verity::{DeviceId, ImageId};
use serde::{Deserialize, Serialize};

use super::{BlobFile, DownloadShelf};
use crate::check::check_error;
use crate::check::check_error::FsckError;
use crate::disk::DiskError;
use crate::record::{self, RECORD_MAX, RecordError};
use crate::shelf::refs::Seconds;

/// Name of the trace that mounts use which name none.
pub const DEFAULT_TRACE: &str = "default";
/// Maximum number of traces of one image.
const TRACES_MAX: usize = 16;
/// Maximum number of runs in all traces of an image. The start of a large server has a few hundred.
const TRACE_RUNS_MAX: usize = 1 << 14;
/// Maximum length in bytes of a trace's name.
const NAME_MAX: usize = 64;
/// Maximum number of devices. An image has at most this many layers.
const DEVICES_MAX: usize = 4096;
/// Maximum length of the commands of a trace, in bytes.
const COMMANDS_MAX: usize = 4096;
/// Version 1 counted in units of 64 KiB. Version 2 had no commands.
const VERSION: u32 = 3;

/// Adjacent blocks of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceRun {
    pub device: DeviceId,
    /// Number of the first block. A block has 16 KiB.
    pub block: u32,
    /// Number of blocks, at least 1.
    pub blocks: u32,
}

/// The parts of an image's devices that a program reads, in the order of the first access.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    /// Name of the trace: 1 to 64 lower-case letters, digits, `.`, `_` and `-`, beginning with a letter or a digit.
    pub name: String,
    /// The blocks read. In a trace that was recorded locally, each block occurs once.
    pub runs: Vec<TraceRun>,
    /// The commands that `quire index` ran to record the trace, or could not run; `None` for other traces.
    pub start: Option<TraceStart>,
}

/// The commands whose reads are a trace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceStart {
    /// The commands, in the notation of a shell.
    pub commands: Vec<String>,
    /// Digest of the image config whose entrypoint and command ran; `None` if the user named the commands. Several
    /// manifests with the same layers have the same image, but not the same config.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<Digest>,
    /// Whether the commands did not run. The trace then has the files that they need in any case.
    #[serde(rename = "closure", default, skip_serializing_if = "is_false")]
    pub is_closure: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_false(it: &bool) -> bool {
    !*it
}

impl TraceStart {
    /// Shortens the commands to the length that a trace can have.
    #[must_use]
    pub fn shortened(mut self) -> Self {
        const MORE: &str = "...";
        let mut left = COMMANDS_MAX;
        for command in &mut self.commands {
            if command.len() > left {
                let mut end = left.saturating_sub(MORE.len());
                while !command.is_char_boundary(end) {
                    end -= 1;
                }
                command.truncate(end);
                if left >= MORE.len() {
                    command.push_str(MORE);
                }
            }
            left -= command.len();
        }
        self.commands.retain(|it| !it.is_empty());
        self
    }
}

/// The traces of an image, with distinct names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Traces(Vec<Trace>);

/// A reason why bytes are not valid traces, or a trace cannot be added.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The name is not valid for a trace.
    #[error(
        "\"{}\" is not a name of a trace: use 1 to {NAME_MAX} lower-case letters, digits, `.`, \
        `_` and `-`",
        .0.escape_debug()
    )]
    Name(String),
    /// The trace exceeds a limit.
    #[error(
        "an image can have at most {TRACES_MAX} traces, with at most {TRACE_RUNS_MAX} runs \
        together"
    )]
    Full,
    /// The bytes are not JSON, or have another structure.
    #[error("the traces of an image are malformed")]
    Json(#[source] serde_json::Error),
    /// The traces have a later version.
    #[error(
        "the traces of an image have version {0}, but this version of Quire reads only {VERSION}"
    )]
    Version(u32),
    /// A field has an invalid value.
    #[error("the traces of an image are damaged: {0}")]
    Damaged(&'static str),
}

/// A reason why the traces of an image are unknown.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoredTracesError {
    #[error("the record of the traces of image {image} is damaged: `quire trace` replaces it")]
    Record { image: Box<ImageId>, source: RecordError },
    /// The traces in the record are damaged.
    #[error("the record of the traces of image {image} is damaged: `quire trace` replaces it")]
    Traces { image: Box<ImageId>, source: TraceError },
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// The traces as written.
#[derive(Debug, Serialize, Deserialize)]
struct Raw {
    version: u32,
    devices: Vec<String>,
    traces: Vec<RawTrace>,
}

#[derive(Debug, Serialize, Deserialize)]
struct RawTrace {
    name: String,
    /// For each run, the index of the device in `devices`, the first block, and the number of blocks.
    runs: Vec<(u32, u32, u32)>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    start: Option<TraceStart>,
}

/// The version, which is checked before the rest is parsed.
#[derive(Deserialize)]
struct RawVersion {
    version: u32,
}

#[derive(Debug, Serialize, Deserialize)]
struct Record {
    /// Id of the image, to detect renamed files.
    image: String,
    #[serde(flatten)]
    traces: Raw,
}

/// Checks the name of a trace.
pub fn check_trace_name(name: &str) -> Result<(), TraceError> {
    let is_plain = |it: u8| it.is_ascii_lowercase() || it.is_ascii_digit();
    let mut bytes = name.bytes();
    let is_name = bytes.next().is_some_and(is_plain)
        && bytes.all(|it| is_plain(it) || b"._-".contains(&it))
        && name.len() <= NAME_MAX;
    if is_name { Ok(()) } else { Err(TraceError::Name(name.to_owned())) }
}

impl Traces {
    /// Returns all traces, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = &Trace> {
        self.0.iter()
    }

    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the trace with this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Trace> {
        self.0.iter().find(|it| it.name == name)
    }

    /// Adds a trace, and replaces any of the same name.
    pub fn set(&mut self, trace: Trace) -> Result<(), TraceError> {
        check_trace_name(&trace.name)?;
        let mut all: Vec<Trace> =
            self.0.iter().filter(|it| it.name != trace.name).cloned().collect();
        all.push(trace);
        all.sort_by(|one, other| one.name.cmp(&other.name));
        if all.len() > TRACES_MAX
            || all.iter().map(|it| it.runs.len()).sum::<usize>() > TRACE_RUNS_MAX
        {
            return Err(TraceError::Full);
        }
        self.0 = all;
        Ok(())
    }

    /// Removes the trace with this name. Returns whether there was one.
    pub fn remove(&mut self, name: &str) -> bool {
        let before = self.0.len();
        self.0.retain(|it| it.name != name);
        self.0.len() < before
    }

    /// Returns the number of runs that a trace of this name can have in addition to the others.
    #[must_use]
    pub fn room(&self, name: &str) -> usize {
        let others = self.0.iter().filter(|it| it.name != name).map(|it| it.runs.len());
        TRACE_RUNS_MAX.saturating_sub(others.sum())
    }

    fn raw(&self) -> Raw {
        let used = self.0.iter().flat_map(|it| &it.runs).map(|it| it.device);
        let devices: BTreeSet<DeviceId> = used.collect();
        let devices: Vec<DeviceId> = devices.into_iter().collect();
        let place = |device: &DeviceId| {
            let place = devices.binary_search(device).unwrap_or_default();
            u32::try_from(place).unwrap_or_default()
        };
        let raw = |it: &Trace| RawTrace {
            name: it.name.clone(),
            runs: it.runs.iter().map(|it| (place(&it.device), it.block, it.blocks)).collect(),
            start: it.start.clone(),
        };
        let traces = self.0.iter().map(raw).collect();
        Raw { version: VERSION, devices: devices.iter().map(ToString::to_string).collect(), traces }
    }

    fn from_raw(raw: Raw) -> Result<Self, TraceError> {
        let scale = match raw.version {
            1 => BLOCKS_OF_A_UNIT,
            2 | VERSION => 1,
            other => return Err(TraceError::Version(other)),
        };
        let damaged = TraceError::Damaged;
        if raw.devices.len() > DEVICES_MAX || raw.traces.len() > TRACES_MAX {
            return Err(damaged("there are too many devices or traces"));
        }
        let devices = raw.devices.iter().map(|text| {
            let id = DeviceId::from_hex(text.as_bytes()).ok();
            id.filter(|it| it.to_string() == *text).ok_or(damaged("a device id"))
        });
        let devices: Vec<DeviceId> = devices.collect::<Result<_, _>>()?;
        let mut all = Self::default();
        for RawTrace { name, runs, start } in raw.traces {
            if all.get(&name).is_some() {
                return Err(damaged("a name occurs twice"));
            }
            let length = |it: &TraceStart| it.commands.iter().map(String::len).sum::<usize>();
            if start.as_ref().is_some_and(|it| length(it) > COMMANDS_MAX) {
                return Err(damaged("the commands of a trace are too long"));
            }
            let runs = runs.into_iter().map(|(device, block, blocks)| {
                let device = usize::try_from(device).ok().and_then(|it| devices.get(it));
                let device = *device.ok_or(damaged("a run of an unknown device"))?;
                let scaled = block.checked_mul(scale).zip(blocks.checked_mul(scale));
                let right = scaled
                    .filter(|(block, blocks)| *blocks > 0 && block.checked_add(*blocks).is_some());
                let run = right.map(|(block, blocks)| TraceRun { device, block, blocks });
                run.ok_or(damaged("a run"))
            });
            all.set(Trace { name, runs: runs.collect::<Result<_, _>>()?, start })?;
        }
        Ok(all)
    }

    /// Encodes the traces as JSON without spaces. Equal traces have equal bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(&self.raw()).unwrap_or_default()
    }

    /// Decodes and checks traces, which may be from an untrusted source.
    ///
    /// # Errors
    /// [`TraceError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, TraceError> {
        let RawVersion { version } = serde_json::from_slice(bytes).map_err(TraceError::Json)?;
        // The version is checked first, because a later version may have other fields.
        if !(1..=VERSION).contains(&version) {
            return Err(TraceError::Version(version));
        }
        Self::from_raw(serde_json::from_slice(bytes).map_err(TraceError::Json)?)
    }
}

impl DownloadShelf {
    /// Returns the traces of an image. The list is empty if there are none.
    pub fn traces(&self, image: &ImageId) -> Result<Traces, StoredTracesError> {
        let bytes = self.directory.read_all(BlobFile::Traces(*image).file_name(), RECORD_MAX)?;
        let Some(bytes) = bytes else { return Ok(Traces::default()) };
        let damaged = |source| StoredTracesError::Record { image: Box::new(*image), source };
        let record: Record = record::decode(&bytes).map_err(damaged)?;
        record::check_image(&record.image, image).map_err(damaged)?;
        let traces = Traces::from_raw(record.traces);
        traces.map_err(|source| StoredTracesError::Traces { image: Box::new(*image), source })
    }

    /// Returns when the traces of an image were written, or `None` if there are none.
    ///
    /// # Errors
    /// [`DiskError`] if the record cannot be examined.
    pub fn traces_time(&self, image: &ImageId) -> Result<Option<Seconds>, DiskError> {
        let stat = self.directory.stat(BlobFile::Traces(*image).file_name())?;
        Ok(stat.map(|it| Seconds(it.st_mtime)))
    }

    /// Replaces the traces of an image, durably. They are removed together with the image.
    ///
    /// # Errors
    /// [`DiskError`] if the traces cannot be written.
    pub fn set_traces(&self, image: &ImageId, traces: &Traces) -> Result<(), DiskError> {
        let record = Record { image: image.to_string(), traces: traces.raw() };
        self.tmp.replace(
            &self.directory,
            BlobFile::Traces(*image).file_name(),
            &record::encode(&record),
        )
    }

    /// Checks the record of an image's traces, and returns the damage.
    pub(super) fn traces_damage(&self, image: &ImageId) -> Result<Option<String>, FsckError> {
        Ok(check_error::found(self.traces(image))?.err())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(byte: u8) -> DeviceId {
        DeviceId::from_bytes(&[byte; 32]).unwrap()
    }

    #[test]
    fn traces_are_text_that_others_can_write() {
        let hex = |byte: &str| byte.repeat(32);
        // The example in docs/format/lazy-artifact.md.
        let text = format!(
            r#"{{"version":3,"devices":["{}","{}"],"traces":[{{"name":"default","runs":[[1,7,2],[0,0,1]],"start":{{"commands":["nginx -t"],"config":"sha256:{}"}}}},{{"name":"initdb","runs":[]}}]}}"#,
            hex("01"),
            hex("0a"),
            hex("0b")
        );
        let traces = Traces::decode(text.as_bytes()).unwrap();
        let runs = [
            TraceRun { device: device(10), block: 7, blocks: 2 },
            TraceRun { device: device(1), block: 0, blocks: 1 },
        ];
        assert_eq!(traces.get("default").unwrap().runs, runs);
        let start = traces.get("default").unwrap().start.clone().unwrap();
        assert_eq!(start.commands, ["nginx -t"]);
        assert_eq!(start.config.unwrap().to_string(), format!("sha256:{}", hex("0b")));
        assert!(traces.get("initdb").unwrap().runs.is_empty() && traces.get("other").is_none());
        assert!(traces.encode() == text.as_bytes());
        // Version 1 counted in units of four blocks.
        let old = text.replace("\"version\":3", "\"version\":1");
        let old = Traces::decode(old.as_bytes()).unwrap();
        let places = |it: &Traces| {
            let runs = it.get("default").unwrap().runs.clone();
            runs.iter().map(|it| (it.block, it.blocks)).collect::<Vec<_>>()
        };
        assert_eq!(places(&old), [(28, 8), (0, 4)]);
        for (wrong, part) in [
            (text.replace("\"version\":3", "\"version\":4"), "version 4"),
            (text.replace("nginx -t", &"x".repeat(COMMANDS_MAX + 1)), "commands"),
            (text.replace(&hex("0b"), "0b"), "malformed"),
            (text.replace("[1,7,2]", "[2,7,2]"), "unknown device"),
            (text.replace("[1,7,2]", "[1,7,0]"), "a run"),
            (text.replace("[1,7,2]", "[1,4294967295,1]"), "a run"),
            (text.replace("[1,7,2]", "[1,4294967296,1]"), "malformed"),
            (text.replace("initdb", "default"), "twice"),
            (text.replace("initdb", "../x"), "not a name"),
            (text.replace("initdb", ""), "not a name"),
            (text.replace(&hex("0a"), &hex("0A")), "a device id"),
            (text.replace("[1,7,2]", &vec!["[1,7,2]"; TRACE_RUNS_MAX].join(",")), "at most"),
            (String::from("[]"), "malformed"),
        ] {
            let error = Traces::decode(wrong.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(part), "{error}: {part}");
        }
    }

    #[test]
    fn commands_are_shortened_to_what_a_trace_can_have() {
        let start = |commands: &[String]| {
            let start = TraceStart { commands: commands.to_vec(), config: None, is_closure: false };
            start.shortened().commands
        };
        assert_eq!(start(&["a b".to_owned()]), ["a b"]);
        // The limit is inside a character of two bytes.
        let long = start(&[format!("x{}", "ä".repeat(COMMANDS_MAX)), "y".to_owned()]);
        let length: usize = long.iter().map(String::len).sum();
        assert!(long[0].ends_with("ä...") && (COMMANDS_MAX - 1..=COMMANDS_MAX).contains(&length));
    }

    #[test]
    fn a_trace_takes_the_place_of_one_of_its_name() {
        let mut traces = Traces::default();
        let run = TraceRun { device: device(1), block: 1, blocks: 1 };
        let trace = |name: &str, runs| Trace { name: name.to_owned(), runs, start: None };
        traces.set(trace("b", vec![])).unwrap();
        traces.set(trace("a", vec![run])).unwrap();
        traces.set(trace("b", vec![run, run])).unwrap();
        let all: Vec<_> = traces.iter().map(|it| (&it.name[..], it.runs.len())).collect();
        assert_eq!(all, [("a", 1), ("b", 2)]);
        assert!(matches!(traces.set(trace("B", vec![])), Err(TraceError::Name(_))));
        // A trace may have as many runs as the other traces leave of the limit.
        assert_eq!(
            ["a", "b", "c"].map(|it| traces.room(it)),
            [2, 1, 3].map(|it| TRACE_RUNS_MAX - it)
        );
        let long = |length| trace("c", vec![run; length]);
        assert!(matches!(traces.set(long(TRACE_RUNS_MAX - 2)), Err(TraceError::Full)));
        traces.set(long(traces.room("c"))).unwrap();
        assert_eq!([traces.room("c"), traces.room("d")], [TRACE_RUNS_MAX - 3, 0]);
        traces.set(trace("c", vec![])).unwrap();
        for number in 3..TRACES_MAX {
            traces.set(trace(&format!("c{number}"), vec![])).unwrap();
        }
        assert!(matches!(traces.set(trace("d", vec![])), Err(TraceError::Full)));
        assert!(traces.get("d").is_none());
    }
}
