//! Runs one round, in which a call fails, and checks the resulting state.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use testing::faults::{Fault, Kind, Mode, Traced};

use super::room::{Ran, Room};
use super::verbs::Verb;

/// The visible effect of a verb.
#[derive(Debug, Clone, PartialEq, Eq)]
struct State {
    probes: Vec<Ran>,
    output: BTreeMap<PathBuf, String>,
    mounts: Vec<String>,
}

/// The behaviour of a verb without faults.
#[derive(Debug)]
pub(super) struct Model {
    verb: Verb,
    ran: Ran,
    /// Whether the verb changes nothing and always prints the same, so that its output is its effect.
    only_prints: bool,
    before: State,
    after: State,
    /// Results of `fsck` and `gc` after the verb.
    settled: Vec<Ran>,
    /// Listing of the store after that.
    store: BTreeMap<PathBuf, String>,
    /// Number of calls that can fail, by kind.
    pub(super) candidates: [u64; Kind::ALL.len()],
}

/// The outcome of a round.
#[derive(Debug)]
pub(super) enum Outcome {
    /// The verb had the same effect as without faults.
    Right,
    /// The verb failed, with this message.
    Refused(String),
    /// The verb made fewer calls than in the model, so none failed.
    Unreached,
    /// The verb or its effect is wrong: the findings.
    Wrong(Vec<String>),
}

impl Model {
    fn repairs(&self) -> bool {
        self.verb.line.contains("--repair")
    }

    pub(super) fn new(room: &mut Room, verb: Verb) -> Result<Self> {
        let mut models = Vec::new();
        for _ in 0..2 {
            let before = begin(room, &verb)?;
            let (traced, ran) = room.traced(&verb, None)?;
            let ran = timeless(ran);
            if traced.timed_out {
                bail!("{}: it hangs without faults", verb.line);
            }
            let after = state(room, &verb)?;
            end(room, &verb)?;
            let settled = settle(room)?;
            let store = room.store()?;
            let left = room.left()?;
            if !left.is_empty() {
                bail!("{}: left without faults: {}", verb.line, left.join(", "));
            }
            let candidates = traced.candidates;
            // A repair reports its findings, which include the fault.
            let only_prints = before == after && !verb.line.contains("--repair");
            models.push(Self { verb, ran, only_prints, before, after, settled, store, candidates });
        }
        let second = models.pop().expect("two were made");
        let mut model = models.pop().expect("two were made");
        if model.ran.code != second.ran.code {
            bail!("{}: exit codes {:?} and {:?}", verb.line, model.ran.code, second.ran.code);
        }
        if model.ran.code.is_none_or(|it| it != 0 && it != 1 && it != 3) {
            bail!("{}: {:?}: {}", verb.line, model.ran.code, model.ran.err);
        }
        model.only_prints &= model.ran.out == second.ran.out;
        let notes = verb.name == "push";
        if notes || !model.store.keys().eq(second.store.keys()) {
            // The verb stores the time, so its digests differ each time. A push succeeds even if it cannot record its
            // destination in a layer's record.
            model.store = shape(&model.store);
        }
        model.before.mask(&second.before);
        model.after.mask(&second.after);
        Ok(model)
    }

    pub(super) fn round(&self, room: &mut Room, fault: Fault<'_>) -> Result<(Outcome, Traced)> {
        let verb = &self.verb;
        begin(room, verb)?;
        let (traced, ran) = room.traced(verb, Some(fault))?;
        let ran = timeless(ran);
        let mut wrong = Vec::new();
        if traced.timed_out {
            wrong.push(String::from("it hangs"));
        }
        let mut now = state(room, verb)?;
        // Ignore unfinished builds, which the message names and the next build there removes. Objects of a digest
        // store are complete, and named by their digests.
        now.output.retain(|path, _| !path.to_string_lossy().contains(".quire-build-"));
        if fault.mode == Mode::FromThenOn {
            now.output.retain(|path, _| !path.to_string_lossy().contains(".tmp-"));
        }
        let is_done = now.is(&self.after);
        let says_done = ran.code == self.ran.code;
        let outlives = verb.line.starts_with("run -d ");
        let tells_loss = outlives && now.is_or_lost(&self.after, fault.mode);
        if ran.code.is_none() || ran.code == Some(101) || ran.err.contains("panicked") {
            wrong.push(format!("it crashed: {:?} {}", ran.code, ran.err));
        } else if says_done {
            if !is_done && !tells_loss {
                wrong.push(format!("it says that it is done: {}", now.against(&self.after)));
            }
            if self.only_prints && ran.out != self.ran.out {
                wrong.push(format!("it says that it is done, and printed {:?}", shorten(&ran.out)));
            }
        } else if !names_a_thing(&ran.out, &ran.err) {
            wrong.push(format!("code {:?}, and the message is {:?}", ran.code, ran.err));
        }
        let settled = settle(room)?;
        for (ran, model) in settled.iter().zip(&self.settled) {
            let may_be = [Some(0), model.code].contains(&ran.code);
            // Damage that the verb should have repaired may remain.
            let was_damaged = !says_done && self.repairs() && ran.code == Some(1);
            if !may_be && !was_damaged {
                wrong.push(format!("afterwards: {:?}: {}{}", ran.code, ran.out, ran.err));
            }
        }
        if !is_done && !says_done {
            // The next command removes files that a command left behind.
            let mut now = state(room, verb)?;
            if fault.mode == Mode::FromThenOn {
                // Files that could not be removed because every call failed have a name that identifies their owner.
                now.output.retain(|path, _| !path.to_string_lossy().contains(".quire-"));
                now.output.retain(|path, _| !path.to_string_lossy().contains(".tmp-"));
                now.output = without_empty(&now.output, &self.before.output);
            }
            now.output.retain(|path, _| !path.to_string_lossy().contains(".quire-build-"));
            if verb.line.contains("--digest-store") {
                now.output.retain(|path, _| {
                    self.before.output.contains_key(path) || !path.starts_with("objects")
                });
            }
            // If no call succeeds, an ended container cannot be removed either.
            let tells_loss = outlives && now.is_or_lost(&self.after, fault.mode);
            if !now.is_between(&self.before, &self.after) && !tells_loss {
                wrong.push(format!("half done: {}", now.against(&self.before)));
            }
        }
        // Running the verb again must complete an unfinished effect; a finished effect is not repeated.
        let is_to_be_done = !is_done || self.before == self.after;
        if !says_done && is_to_be_done && verb.before.is_empty() {
            end(room, verb)?;
            let again = room.run(verb.line, verb.input)?;
            if again.code != self.ran.code {
                wrong.push(format!("done again: {:?}: {}", again.code, shorten(&again.err)));
            }
        }
        end(room, verb)?;
        // A monitor that is about to end still holds the lock of files that `gc` has to remove.
        wrong.extend(room.left()?.into_iter().map(|it| format!("left: {it}")));
        settle(room)?;
        let mut store = room.store()?;
        if self.store.contains_key(Path::new(SHAPE)) {
            store = shape(&store);
        }
        if (says_done || verb.before.is_empty()) && store != self.store {
            wrong.push(format!("the store differs: {}", difference(&store, &self.store)));
        }
        // A failed repair may leave damaged files, but must not remove others.
        if self.repairs() && !says_done {
            // The mark of an incomplete image is removed once the image is complete, even if damaged files remain.
            let is_mark = |it: &Path| it.extension().is_some_and(|it| it == "lacking");
            let kept = self.store.keys().filter(|it| !is_mark(it.as_ref()));
            let lost: Vec<_> = kept.filter(|it| !store.contains_key(*it)).collect();
            if !lost.is_empty() {
                wrong.push(format!("sound files were removed: {lost:?}"));
            }
        }
        wrong.extend(room.left()?.into_iter().map(|it| format!("left: {it}")));
        let outcome = if !wrong.is_empty() {
            if !says_done {
                wrong.push(format!("it had said {:?}", shorten(&ran.err)));
            }
            Outcome::Wrong(wrong)
        } else if traced.failed.is_empty() {
            Outcome::Unreached
        } else if says_done && is_done {
            Outcome::Right
        } else {
            Outcome::Refused(ran.err)
        };
        Ok((outcome, traced))
    }
}

fn begin(room: &mut Room, verb: &Verb) -> Result<State> {
    room.restore(verb.base)?;
    for line in verb.before {
        room.must(line)?;
    }
    state(room, verb)
}

fn end(room: &Room, verb: &Verb) -> Result<()> {
    verb.after.iter().try_for_each(|line| room.must(line))
}

/// Runs `fsck`, which should find nothing, and `gc`, which frees unused data.
fn settle(room: &Room) -> Result<Vec<Ran>> {
    ["fsck", "gc"].iter().map(|line| room.run(line, "")).collect()
}

/// Key that marks a list made by `shape`.
const SHAPE: &str = "*";

/// Counts the entries in each top-level folder of the store.
fn shape(store: &BTreeMap<PathBuf, String>) -> BTreeMap<PathBuf, String> {
    let mut counts: BTreeMap<PathBuf, usize> = BTreeMap::new();
    for path in store.keys() {
        *counts.entry(path.iter().take(1).collect()).or_default() += 1;
    }
    // Objects are in folders named by their first digits, so the number of folders varies.
    counts.remove(Path::new("objects"));
    let counts = counts.into_iter().map(|(path, count)| (path, format!("{count} files")));
    counts.chain([(PathBuf::from(SHAPE), String::new())]).collect()
}

/// Returns the output without new folders that contain no file, because they cannot be removed if no call succeeds.
fn without_empty(
    output: &BTreeMap<PathBuf, String>,
    before: &BTreeMap<PathBuf, String>,
) -> BTreeMap<PathBuf, String> {
    let is_file = |kind: &String| kind != "directory";
    let holds =
        |folder: &Path| output.iter().any(|(it, kind)| is_file(kind) && it.starts_with(folder));
    let kept = output
        .iter()
        .filter(|(path, kind)| is_file(kind) || before.contains_key(*path) || holds(path));
    kept.map(|(path, kind)| (path.clone(), kind.clone())).collect()
}

fn state(room: &Room, verb: &Verb) -> Result<State> {
    let probes = ["images --json"].iter().chain(verb.probes);
    let probes = probes.map(|it| room.run(it, "").map(timeless)).collect::<Result<Vec<_>>>()?;
    Ok(State { probes, output: room.output()?, mounts: room.mounts()? })
}

/// Removes the times and durations from the output of a run.
fn timeless(ran: Ran) -> Ran {
    let is_time = |word: &str| {
        let is_digits = word.bytes().all(|it| it.is_ascii_digit());
        let is_written = word.len() >= 8
            && word.bytes().all(|it| it.is_ascii_digit() || b"-:.TZ".contains(&it))
            && word.bytes().filter(|it| b"-:".contains(it)).count() >= 2;
        let is_duration = word.split_once('.').is_some_and(|(whole, part)| {
            part.len() == 2 && [whole, part].concat().bytes().all(|it| it.is_ascii_digit())
        });
        (is_digits && word.len() == 10) || is_written || is_duration
    };
    let is_part = |it: char| it.is_ascii_alphanumeric() || "-:._".contains(it);
    let mut out = String::with_capacity(ran.out.len());
    let mut rest = ran.out.as_str();
    while let Some(start) = rest.find(is_part) {
        let end = rest[start..].find(|it| !is_part(it)).map_or(rest.len(), |it| start + it);
        out.push_str(&rest[..start]);
        out.push_str(if is_time(&rest[start..end]) { "TIME" } else { &rest[start..end] });
        rest = &rest[end..];
    }
    out.push_str(rest);
    Ran { out, ..ran }
}

/// Placeholder for a line that differs each time.
const OTHER: &str = "*";

impl State {
    /// Replaces lines that differ between two runs without faults by a placeholder that equals every line.
    fn mask(&mut self, other: &Self) {
        for (probe, other) in self.probes.iter_mut().zip(&other.probes) {
            // The message of a failing probe is not compared.
            if probe.out.lines().count() != other.out.lines().count() {
                probe.out = String::from(OTHER);
                continue;
            }
            let lines = probe.out.lines().zip(other.out.lines());
            let lines: Vec<_> = lines.map(|(a, b)| if a == b { a } else { OTHER }).collect();
            probe.out = lines.join("\n");
        }
        for (path, value) in &mut self.output {
            if other.output.get(path).is_none_or(|it| it != value) {
                *value = String::from(OTHER);
            }
        }
    }

    fn is(&self, model: &Self) -> bool {
        self.probes.iter().zip(&model.probes).all(|(ran, model)| is_same(ran, model))
            && is_same_output(&self.output, &model.output)
            && self.mounts == model.mounts
    }

    /// Whether the state equals the model except for reports about a container that outlives its command: that the
    /// disk lost some of its writes, or, only if no call succeeds, how the container ended.
    fn is_or_lost(&self, model: &Self, mode: Mode) -> bool {
        let mut said = vec![
            "\"lost\": true",
            "some data of the container was lost",
            "bytes of the container's output are lost",
        ];
        if mode == Mode::FromThenOn {
            said.push("\"status\": \"lost\"");
        }
        let is_said = |it: &Ran| said.iter().any(|said| it.out.contains(said));
        let (images, others) = self.probes.split_first().expect("images are asked first");
        others.iter().any(is_said)
            && model.probes.first().is_some_and(|model| is_same(images, model))
            && is_same_output(&self.output, &model.output)
            && self.mounts == model.mounts
    }

    /// Whether each part equals that of one of the two models.
    fn is_between(&self, before: &Self, after: &Self) -> bool {
        let models = before.probes.iter().zip(&after.probes);
        let mut probes = self.probes.iter().zip(models);
        probes.all(|(ran, (before, after))| is_same(ran, before) || is_same(ran, after))
            && (is_same_output(&self.output, &before.output)
                || is_same_output(&self.output, &after.output))
            && (self.mounts == before.mounts || self.mounts == after.mounts)
    }

    /// Describes the differences from a model.
    fn against(&self, model: &Self) -> String {
        let mut text = Vec::new();
        for (ran, model) in self.probes.iter().zip(&model.probes) {
            if !is_same(ran, model) {
                text.push(format!(
                    "a probe gives {:?} {:?} {:?} and should give {:?} {:?}",
                    ran.code,
                    contrast(&ran.out, &model.out),
                    shorten(&ran.err),
                    model.code,
                    contrast(&model.out, &ran.out)
                ));
            }
        }
        if !is_same_output(&self.output, &model.output) {
            text.push(difference(&self.output, &model.output));
        }
        if self.mounts != model.mounts {
            text.push(format!("mounts: {:?}", self.mounts));
        }
        text.join("; ")
    }
}

fn is_same(ran: &Ran, model: &Ran) -> bool {
    if model.out == OTHER {
        return ran.code == model.code;
    }
    let (lines, models) = (ran.out.lines(), model.out.lines());
    ran.code == model.code
        && ran.out.lines().count() == model.out.lines().count()
        && lines.zip(models).all(|(line, model)| model == OTHER || line == model)
}

fn is_same_output(output: &BTreeMap<PathBuf, String>, model: &BTreeMap<PathBuf, String>) -> bool {
    output.len() == model.len()
        && output
            .iter()
            .all(|(path, value)| model.get(path).is_some_and(|it| it == OTHER || it == value))
}

/// Returns the first part of a text that differs from another, from the first different line on.
fn contrast<'a>(one: &'a str, other: &str) -> &'a str {
    let lines = one.lines().zip(other.lines());
    let same: usize = lines.take_while(|(a, b)| a == b).map(|(a, _)| a.len() + 1).sum();
    let rest = one.get(same..).unwrap_or_default();
    rest.char_indices().nth(300).map_or(rest, |(end, _)| &rest[..end])
}

fn difference(found: &BTreeMap<PathBuf, String>, expected: &BTreeMap<PathBuf, String>) -> String {
    let lacks = expected.iter().filter(|(path, value)| found.get(*path) != Some(value));
    let lacks: Vec<_> = lacks.map(|(path, value)| format!("-{} {value}", path.display())).collect();
    let more = found.iter().filter(|(path, value)| expected.get(*path) != Some(value));
    let more: Vec<_> = more.map(|(path, value)| format!("+{} {value}", path.display())).collect();
    [lacks, more].concat().join(", ")
}

/// Returns the end of a text that may be long.
fn shorten(text: &str) -> String {
    let from = text.char_indices().rev().nth(400).map_or(0, |it| it.0);
    text[from..].to_owned()
}

/// Whether a message states more than the system's error: the operation and its object. If the verb's output is a
/// list of findings, that list may state it instead.
fn names_a_thing(out: &str, err: &str) -> bool {
    let message = if err.is_empty() { out } else { err };
    // Log lines are not part of the message.
    let mut lines = message.lines().filter(|line| !line.trim_start().starts_with("WARN "));
    let said = lines.clone().find(|line| line.contains("os error")).or_else(|| lines.next_back());
    let Some(said) = said else { return false };
    let without = said.split(" (os error").next().unwrap_or(said);
    // A bare message has the program's name, the object, and the system's error.
    let is_bare = said.contains("os error") && without.split(": ").count() < 3;
    !is_bare && without.split_whitespace().count() > 3
}

#[cfg(test)]
mod tests {
    use super::names_a_thing;

    #[test]
    fn an_error_of_the_system_alone_names_nothing() {
        for (message, expected) in [
            ("quire: cannot write /x/y: No space left on device (os error 28)\n", true),
            ("quire: No space left on device (os error 28)\n", false),
            ("quire: the file system at / is full\n", true),
            (
                " WARN not used error=I/O error (os error 5)\nquire: No space left (os error 28)\n",
                false,
            ),
            ("", false),
        ] {
            assert_eq!(names_a_thing("", message), expected, "{message}");
        }
    }
}
