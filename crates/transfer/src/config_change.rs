//! Changes to an image's config, written as lines of a Dockerfile, for commits and imports.

use std::str::FromStr;

use serde_json::{Map, Value, json};

/// A change to a config. Source: Docker, "docker container commit", `--change`, and the "Dockerfile reference".
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// `CMD`: the program to run if the caller names none.
    Cmd(Vec<String>),
    /// `ENTRYPOINT`: the program that gets `CMD` as arguments. Without a new `CMD`, the base image's `CMD` is
    /// removed.
    Entrypoint(Vec<String>),
    /// `ENV`: environment variables.
    Env(Vec<(String, String)>),
    /// `LABEL`: names and values.
    Label(Vec<(String, String)>),
    /// `EXPOSE`: ports.
    Expose(Vec<String>),
    /// `VOLUME`: directories for data outside the image.
    Volume(Vec<String>),
    User(String),
    Workdir(String),
    StopSignal(String),
}

/// Text that is not a valid [`Change`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ChangeError(String);

impl FromStr for Change {
    type Err = ChangeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        // As in podman, `CMD=/bin/bash` is accepted besides a Dockerfile's form.
        let (name, rest) = text
            .split_once(char::is_whitespace)
            .or_else(|| text.split_once('='))
            .unwrap_or((text, ""));
        let rest = rest.trim();
        let name = name.to_ascii_uppercase();
        let error = |reason: &str| ChangeError(format!("{name} {reason}"));
        let wrong = |reason: &str| Err(error(reason));
        let one = || match rest {
            "" => Err(error("needs a value")),
            rest => Ok(unquoted(rest)),
        };
        Ok(match name.as_str() {
            "CMD" => Self::Cmd(command(rest)),
            "ENTRYPOINT" => Self::Entrypoint(command(rest)),
            "ENV" | "LABEL" => {
                let Some(pairs) = pairs(rest) else {
                    return wrong("needs NAME=VALUE pairs, separated by spaces");
                };
                match name.as_str() {
                    "ENV" => Self::Env(pairs),
                    _ => Self::Label(pairs),
                }
            }
            "EXPOSE" => {
                let ports: Option<Vec<_>> = rest.split_whitespace().map(ports).collect();
                match ports.map(|it| it.concat()).filter(|it| !it.is_empty()) {
                    Some(ports) => Self::Expose(ports),
                    None => {
                        return wrong("needs ports from 1 to 65535, such as 80 53/udp 8000-8010");
                    }
                }
            }
            "VOLUME" => match list(rest).unwrap_or_else(|| words(rest)) {
                paths if paths.is_empty() => return wrong("needs paths"),
                paths => Self::Volume(paths),
            },
            "USER" => Self::User(one()?),
            "WORKDIR" => Self::Workdir(one()?),
            "STOPSIGNAL" => Self::StopSignal(one()?),
            _ => {
                return Err(ChangeError(format!(
                    "\"{name}\" is not one of CMD, ENTRYPOINT, ENV, EXPOSE, LABEL, STOPSIGNAL, USER, VOLUME and WORKDIR"
                )));
            }
        })
    }
}

impl Change {
    /// Changes `config` of an image's config. The change is one of `all`.
    fn apply(&self, settings: &mut Map<String, Value>, all: &[Self]) {
        let mut set = |name: &str, value: Value| {
            settings.insert(name.to_owned(), value);
        };
        match self {
            Self::Cmd(args) => set("Cmd", args.clone().into()),
            Self::Entrypoint(args) => {
                set("Entrypoint", args.clone().into());
                if !all.iter().any(|it| matches!(it, Self::Cmd(_))) {
                    settings.shift_remove("Cmd");
                }
            }
            Self::Env(pairs) => {
                let mut env = settings.get("Env").and_then(Value::as_array).cloned();
                let env_list = env.get_or_insert_default();
                for (name, value) in pairs {
                    let text = Value::from(format!("{name}={value}"));
                    let is_same = |it: &Value| {
                        let other = it.as_str().unwrap_or_default();
                        other.split_once('=').map_or(other, |(name, _)| name) == name
                    };
                    match env_list.iter_mut().find(|it| is_same(it)) {
                        Some(there) => *there = text,
                        None => env_list.push(text),
                    }
                }
                settings.insert("Env".to_owned(), env.into());
            }
            Self::Label(pairs) => {
                let pairs = pairs.iter().map(|(name, value)| (name.clone(), value.clone().into()));
                add(settings, "Labels", pairs);
            }
            Self::Expose(ports) => {
                let ports = ports.iter().map(|port| (port.clone(), json!({})));
                add(settings, "ExposedPorts", ports);
            }
            Self::Volume(paths) => {
                let paths = paths.iter().map(|path| (path.clone(), json!({})));
                add(settings, "Volumes", paths);
            }
            Self::User(user) => set("User", user.clone().into()),
            Self::Workdir(path) if path.starts_with('/') => set("WorkingDir", path.clone().into()),
            Self::Workdir(path) => {
                let above = settings.get("WorkingDir").and_then(Value::as_str).unwrap_or_default();
                let whole = format!("/{}/{path}", above.trim_matches('/'));
                let whole = whole.replace("//", "/");
                settings.insert("WorkingDir".to_owned(), whole.into());
            }
            Self::StopSignal(signal) => set("StopSignal", signal.clone().into()),
        }
    }
}

/// Changes an image's config, in the order of the changes.
pub(crate) fn apply_all(config: &mut Value, changes: &[Change]) {
    if changes.is_empty() {
        return;
    }
    let mut settings = match config["config"].take() {
        Value::Object(settings) => settings,
        _ => Map::new(),
    };
    for change in changes {
        change.apply(&mut settings, changes);
    }
    config["config"] = settings.into();
}

fn add(settings: &mut Map<String, Value>, name: &str, more: impl Iterator<Item = (String, Value)>) {
    let mut found = match settings.get(name) {
        Some(Value::Object(found)) => found.clone(),
        _ => Map::new(),
    };
    found.extend(more);
    settings.insert(name.to_owned(), found.into());
}

/// Parses a JSON list; other text is a line for the shell.
fn command(text: &str) -> Vec<String> {
    list(text).unwrap_or_else(|| match text {
        "" => Vec::new(),
        text => ["/bin/sh", "-c", text].map(str::to_owned).to_vec(),
    })
}

fn list(text: &str) -> Option<Vec<String>> {
    serde_json::from_str(text).ok()
}

/// Parses a port or a range of ports, such as `80`, `53/udp` and `8000-8010/tcp`. Source: moby,
/// `builder/dockerfile/dispatchers.go`, and docker/go-connections, `nat.ParsePortRange`.
fn ports(text: &str) -> Option<Vec<String>> {
    let (range, protocol) = text.split_once('/').unwrap_or((text, "tcp"));
    let protocol = protocol.to_ascii_lowercase();
    if !matches!(protocol.as_str(), "tcp" | "udp" | "sctp") {
        return None;
    }
    // `parse` accepts a sign.
    let port = |text: &str| -> Option<u16> {
        let is_number = !text.is_empty() && text.bytes().all(|it| it.is_ascii_digit());
        text.parse().ok().filter(|it| is_number && *it > 0)
    };
    let (first, last) = range.split_once('-').unwrap_or((range, range));
    let (first, last) = (port(first)?, port(last)?);
    (first <= last).then(|| (first..=last).map(|it| format!("{it}/{protocol}")).collect())
}

/// Parses `NAME=VALUE…`, or one name followed by spaces and its value.
fn pairs(text: &str) -> Option<Vec<(String, String)>> {
    let first = text.split_whitespace().next()?;
    if !first.contains('=') {
        let (name, value) = text.split_once(char::is_whitespace)?;
        return Some(vec![(name.to_owned(), unquoted(value.trim()))]);
    }
    let pairs = words(text).into_iter().map(|word| {
        let (name, value) = word.split_once('=')?;
        (!name.is_empty()).then(|| (name.to_owned(), value.to_owned()))
    });
    pairs.collect()
}

/// Splits text into words like a shell: quotes keep spaces, and a backslash quotes the next character. Other
/// characters are not special.
fn words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        match (letter, quote) {
            ('\\', None | Some('"')) => word.get_or_insert_default().extend(letters.next()),
            ('"' | '\'', None) => {
                quote = Some(letter);
                word.get_or_insert_default();
            }
            (letter, Some(end)) if letter == end => quote = None,
            (letter, None) if letter.is_whitespace() => words.extend(word.take()),
            (letter, _) => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word);
    words
}

fn unquoted(text: &str) -> String {
    words(text).join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected values: the results of `docker build` for the same lines.
    #[test]
    fn lines_of_a_dockerfile() {
        let below =
            json!({"Cmd": ["a"], "Env": ["A=1", "AB=2"], "WorkingDir": "/w", "Labels": {"x": "y"}});
        let check = |lines: &[&str], expect: Value| {
            let changes: Vec<Change> = lines.iter().map(|it| it.parse().unwrap()).collect();
            let mut settings = below.as_object().unwrap().clone();
            for change in &changes {
                change.apply(&mut settings, &changes);
            }
            for (name, expect) in expect.as_object().unwrap() {
                assert_eq!(settings.get(name).unwrap_or(&Value::Null), expect, "{lines:?} {name}");
            }
        };
        check(&["CMD [\"b\", \"c d\"]"], json!({"Cmd": ["b", "c d"]}));
        check(&["cmd b  c"], json!({"Cmd": ["/bin/sh", "-c", "b  c"]}));
        check(&["ENTRYPOINT [\"e\"]"], json!({"Entrypoint": ["e"], "Cmd": null}));
        check(&["CMD [\"b\"]", "ENTRYPOINT [\"e\"]"], json!({"Entrypoint": ["e"], "Cmd": ["b"]}));
        check(
            &["ENV A=3 B=\"x y\" C=z\\ z", "ENV D one two"],
            json!({"Env": ["A=3", "AB=2", "B=x y", "C=z z", "D=one two"]}),
        );
        check(&["LABEL a=b 'c d'=e x=z"], json!({"Labels": {"x": "z", "a": "b", "c d": "e"}}));
        check(&["EXPOSE 80 53/UDP"], json!({"ExposedPorts": {"80/tcp": {}, "53/udp": {}}}));
        check(
            &["EXPOSE 080 7-8/udp 65535"],
            json!({"ExposedPorts": {"80/tcp": {}, "7/udp": {}, "8/udp": {}, "65535/tcp": {}}}),
        );
        check(&["VOLUME /a /b"], json!({"Volumes": {"/a": {}, "/b": {}}}));
        check(&["WORKDIR /x", "WORKDIR y/z"], json!({"WorkingDir": "/x/y/z"}));
        check(&["WORKDIR y"], json!({"WorkingDir": "/w/y"}));
        check(&["USER=5:6", "CMD=/b"], json!({"User": "5:6", "Cmd": ["/bin/sh", "-c", "/b"]}));
        check(&["USER 5:6", "STOPSIGNAL SIGINT"], json!({"User": "5:6", "StopSignal": "SIGINT"}));
    }

    #[test]
    fn a_config_without_settings_gets_some() {
        let changes = ["USER 5", "CMD [\"a\"]"].map(|it| it.parse().unwrap());
        for mut config in [json!({"os": "linux"}), json!({"os": "linux", "config": null})] {
            apply_all(&mut config, &[]);
            assert!(config["config"].is_null());
            apply_all(&mut config, &changes);
            assert_eq!(config, json!({"os": "linux", "config": {"User": "5", "Cmd": ["a"]}}));
        }
    }

    #[test]
    fn other_lines_are_refused() {
        for (line, expect) in [
            ("RUN x", "is not one of CMD"),
            ("", "is not one of CMD"),
            ("ENV", "NAME=VALUE"),
            ("ENV A", "NAME=VALUE"),
            ("ENV A=1 B", "NAME=VALUE"),
            ("LABEL =x", "NAME=VALUE"),
            ("EXPOSE", "such as 80"),
            ("EXPOSE 80/x", "such as 80"),
            ("EXPOSE 70000", "such as 80"),
            ("EXPOSE 0", "such as 80"),
            ("EXPOSE +80", "such as 80"),
            ("EXPOSE 80-", "such as 80"),
            ("EXPOSE 9-7", "such as 80"),
            ("EXPOSE 1-2-3/tcp", "such as 80"),
            ("USER", "needs a value"),
            ("VOLUME", "paths"),
        ] {
            let error = line.parse::<Change>().unwrap_err().to_string();
            assert!(error.contains(expect), "{line}: {error}");
        }
    }
}
