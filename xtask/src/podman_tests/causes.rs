//! Why tests do not pass: rules that a person wrote.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use regex_lite::Regex;

use super::tap::{FileResult, Outcome, TestResult};

/// Rules, of which the first that matches a test gives its cause.
#[derive(Debug)]
pub(super) struct Causes(Vec<(Regex, String)>);

impl Causes {
    pub(super) fn load(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path)
            .with_context(|| format!("cannot read the causes in {}", path.display()))?;
        Self::parse(&text)
    }

    /// Reads lines of the form `REGULAR EXPRESSION => CAUSE`.
    fn parse(text: &str) -> Result<Self> {
        let mut rules = Vec::new();
        for (number, line) in text.lines().enumerate() {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let number = number + 1;
            let (pattern, cause) = line
                .split_once(" => ")
                .with_context(|| format!("line {number} of the causes has no ` => `"))?;
            let pattern = Regex::new(&format!("(?m){pattern}"))
                .with_context(|| format!("line {number} of the causes: {pattern}"))?;
            rules.push((pattern, cause.trim().to_owned()));
        }
        Ok(Self(rules))
    }

    /// Sets the cause of each test that does not pass, and returns the tests without one.
    pub(super) fn explain(&self, file: &mut FileResult) -> Vec<String> {
        let mut unknown = Vec::new();
        for test in &mut file.tests {
            match self.cause(&file.name, test) {
                Some(cause) => test.cause = cause,
                None => {
                    unknown.push(format!("{} {}: {}", file.name, test.number, test.name));
                    test.cause = String::from(NO_CAUSE);
                }
            }
        }
        unknown
    }

    fn cause(&self, file: &str, test: &TestResult) -> Option<String> {
        let rule = |text: &str| {
            self.0.iter().find(|(pattern, _)| pattern.is_match(text)).map(|it| it.1.clone())
        };
        match &test.outcome {
            Outcome::Passed => Some(String::new()),
            // A test's own reason is enough, unless a rule has a better one.
            Outcome::Skipped(reason) => {
                Some(rule(&subject(file, test, reason)).unwrap_or_else(|| reason.replace('`', "'")))
            }
            Outcome::Unfinished => Some(String::from("not run within the time limit")),
            Outcome::Failed => rule(&subject(file, test, &failure(&test.output))),
        }
    }
}

/// Returns the lines about the failure: the line of the test that failed, and the last command with its output. Commands
/// before that may fail as the test expects, and those of the teardown are no cause.
fn failure(output: &str) -> String {
    let lines = output.lines().take_while(|it| !it.starts_with("# [teardown]"));
    let output = &*lines.collect::<Vec<_>>().join("\n");
    // The tests frame what an assertion prints.
    let end = output.find("\n#\\^").unwrap_or(output.len());
    let output = output.get(..end).unwrap_or(output);
    let is_command = |line: &&str| line.starts_with('[') && line.contains("/podman.sh ");
    let place = output.lines().take_while(|line| !line.starts_with('['));
    let commands = output.lines().filter(is_command).count();
    let mut seen = 0;
    let last = output.lines().skip_while(|line| {
        seen += usize::from(is_command(line));
        commands > 0 && seen < commands
    });
    if commands == 0 {
        return output.to_owned();
    }
    place.chain(last).collect::<Vec<_>>().join("\n")
}

/// Stands for a cause that no rule gives.
const NO_CAUSE: &str = "no cause is recorded";

/// The text that rules are compared with: the file's number and the test's name in the first line, and its output.
fn subject(file: &str, test: &TestResult, output: &str) -> String {
    let number = file.split('-').next().unwrap_or_default();
    format!("{number} {}\n{output}", test.name)
}

#[cfg(test)]
mod tests {
    use rig::process::repository;

    use super::*;

    const OUTPUT: &str = "1..3\n\
        not ok 1 [130] podman kill - no restart\n\
        # quire: unknown option --restart: Quire does not restart containers\n\
        # # [teardown]\n\
        # quire: unknown command\n\
        not ok 2 [130] podman kill - other\n\
        # # [teardown]\n\
        # quire: unknown command\n\
        ok 3 [130] podman kill - not here # skip no `ssh`\n";

    #[test]
    fn the_first_rule_that_matches_gives_the_cause() {
        let rules = "# a remark\n\n\
            unknown command => teardown\n\
            ^130 .*no restart$ => by name\n\
            option --restart => by output\n";
        let mut file = FileResult::parse("130-kill.bats", OUTPUT);
        let unknown = Causes::parse(rules).unwrap().explain(&mut file);
        let causes: Vec<_> = file.tests.iter().map(|it| it.cause.as_str()).collect();
        assert_eq!(causes, ["by name", NO_CAUSE, "no 'ssh'"]);
        assert_eq!(unknown, ["130-kill.bats 2: podman kill - other"]);
    }

    /// The lines are those of bats 1.8.2 and of podman's `helpers.bash`.
    #[test]
    fn the_last_command_before_the_failure_counts() {
        let text = "(in test file 160-volumes.bats, line 20)\n  `run_podman volume ls' failed\n\n\
            [19:40:31.1] # /x/podman.sh  create a\n[19:40:31.2] first\n\n\
            [19:40:31.3] # /x/podman.sh  volume ls\n[19:40:31.4] second\n[19:40:31.5] [ rc=2 ]\n\
            #/vvv\n#| FAIL: exit code is 2\n#\\^^^\n[19:40:31.6] # /x/podman.sh  rm -a\n# [teardown]\n";
        let found = failure(text);
        for expect in ["run_podman volume ls", "volume ls\n", "second", "rc=2", "exit code is 2"] {
            assert!(found.contains(expect), "{expect}: {found}");
        }
        for other in ["first", "create a", "rm -a", "teardown"] {
            assert!(!found.contains(other), "{other}: {found}");
        }
        assert_eq!(failure("buildah: not found\n# [teardown]\n"), "buildah: not found");
    }

    #[test]
    fn wrong_rules_are_refused() {
        let check = |text: &str, expect: &str| {
            let error = Causes::parse(text).unwrap_err().to_string();
            assert!(error.starts_with(expect), "{error}");
        };
        check("# x\nno arrow", "line 2 of the causes has no");
        check("( => x", "line 1 of the causes: (");
    }

    #[test]
    fn the_rules_of_the_project_are_valid() {
        let path = repository().join(super::super::SCRIPTS).join("causes.txt");
        assert!(!Causes::load(&path).unwrap().0.is_empty());
    }
}
