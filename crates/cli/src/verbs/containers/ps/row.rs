//! Containers in podman's words, for `ps --format`. Source: podman-ps(1), and podman's `cmd/podman/containers/ps.go`.

use container::life::lookup::KnownContainer;
use container::listed_settings::ListedSettings;
use container::network::Ports;
use serde_json::{Value, json};

use crate::output::podman_text::{go_time, human_duration, human_size};
use crate::output::report;
use crate::verbs::containers::ps::ports::PortsReport;

/// Titles of fields that differ from their names.
pub(super) const TITLES: [(&str, &str); 4] = [
    ("ID", "CONTAINER ID"),
    ("CreatedHuman", "CREATED"),
    ("Pod", "POD ID"),
    ("PodName", "PODNAME"),
];

/// A container, with its settings.
pub(super) struct ListedContainer<'a> {
    pub(super) known: &'a KnownContainer,
    pub(super) settings: &'a ListedSettings,
    /// Size of the writable layer. `None` if it was not asked for, or is unknown.
    pub(super) written: Option<u64>,
}

/// Returns the word of podman for a container's status.
pub(super) fn state(known: &KnownContainer) -> &'static str {
    match known.status() {
        "unwatched" => "running",
        "lost" => "exited",
        "damaged" => "unknown",
        // `created`, `running`, `exited`, and words that are podman's.
        other => other,
    }
}

/// Returns the names of a container's networks. There are none if it has only loopback, or shares the host's network.
pub(super) fn networks(settings: &ListedSettings) -> Vec<&str> {
    if !settings.networks.is_empty() {
        return settings.networks.iter().map(String::as_str).collect();
    }
    let kind = settings.network.as_deref().filter(|it| !["none", "host"].contains(it));
    kind.into_iter().collect()
}

impl ListedContainer<'_> {
    /// Returns the fields for templates, at the time `now` in seconds since 1970.
    pub(super) fn fields(&self, is_whole: bool, now: i64) -> Value {
        let Self { known, settings, written } = self;
        let created = self.created();
        let age = || human_duration(now.saturating_sub(created));
        let short = |id: String| if is_whole { id } else { report::short(&id) };
        let command = known.command().join(" ");
        let command = if is_whole { command } else { report::truncated(&command) };
        let ports: Vec<_> = self.ports().iter().map(PortsReport::text).collect();
        let mounts: Vec<_> = settings.mounts.iter().map(|it| it.destination.as_str()).collect();
        json!({
            // Names are ids of containers, and must be whole to be found.
            "ID": known.id,
            "Names": known.id,
            "Image": self.image(),
            "ImageID": short(self.image_id()),
            "Command": command,
            "Created": go_time(created),
            "CreatedAt": go_time(created),
            "CreatedHuman": format!("{} ago", age()),
            "RunningFor": format!("{} ago", age()),
            "State": state(known),
            "Status": self.status(now),
            "Ports": ports.join(", "),
            "Size": written.map_or_else(String::new, |it| human_size(it, "")),
            "Labels": settings.labels,
            "Mounts": mounts.join(","),
            "Networks": networks(settings).join(","),
            "Pid": self.pid(),
            "ExitCode": known.code().unwrap_or_default(),
            "Exited": state(known) == "exited",
            "ExitedAt": self.exited_at(),
            "StartedAt": self.started_at(),
            "AutoRemove": self.is_removed_at_end(),
            "Restarts": known.restarts(),
            "Pod": "",
            "PodName": "",
            "IsInfra": false,
        })
    }

    /// Returns the object of `--format json`.
    pub(super) fn json(&self, now: i64) -> Value {
        let Self { known, settings, written } = self;
        let created = self.created();
        let mounts: Vec<_> = settings.mounts.iter().map(|it| it.destination.as_str()).collect();
        let ports = self.ports().into_iter().map(|it| {
            json!({
                "host_ip": it.address.unwrap_or_default(),
                "container_port": it.container,
                "host_port": it.host,
                "range": it.count,
                "protocol": it.protocol,
            })
        });
        json!({
            "AutoRemove": self.is_removed_at_end(),
            "Command": known.command(),
            "Created": created,
            "CreatedAt": format!("{} ago", human_duration(now.saturating_sub(created))),
            "Exited": state(known) == "exited",
            "ExitedAt": self.exited_at(),
            "ExitCode": known.code().unwrap_or_default(),
            "Id": known.id,
            "Image": self.image(),
            "ImageID": self.image_id(),
            "IsInfra": false,
            "Labels": settings.labels,
            "Mounts": mounts,
            "Names": [known.id],
            "Networks": networks(settings),
            "Pid": self.pid(),
            "Pod": "",
            "PodName": "",
            "Ports": ports.collect::<Vec<_>>(),
            "Restarts": known.restarts(),
            "Size": written.map(|it| json!({"rwSize": it})),
            "StartedAt": self.started_at(),
            "State": state(known),
            "Status": self.status(now),
        })
    }

    fn created(&self) -> i64 {
        self.known.record.as_ref().map_or(0, |it| it.created.0)
    }

    fn started_at(&self) -> i64 {
        self.known.state.as_ref().map_or(0, |it| it.started)
    }

    fn exited_at(&self) -> i64 {
        self.known.state.as_ref().and_then(|it| it.finished).unwrap_or_default()
    }

    fn pid(&self) -> u32 {
        let has_program = self.known.is_running() && self.known.delay().is_none();
        let state = self.known.state.as_ref().filter(|_| has_program);
        state.map_or(0, |it| it.pid)
    }

    fn is_removed_at_end(&self) -> bool {
        self.known.record.as_ref().is_some_and(|it| !it.keep)
    }

    fn image(&self) -> String {
        let record = self.known.record.as_ref();
        let name = record.and_then(|it| it.name.clone());
        name.unwrap_or_else(|| report::short(&self.image_id()))
    }

    fn image_id(&self) -> String {
        self.known.record.as_ref().map_or_else(String::new, |it| it.image.to_string())
    }

    fn ports(&self) -> Vec<PortsReport> {
        if !self.known.is_watched() {
            return Vec::new();
        }
        Ports::noted(&self.known.folder).iter().map(PortsReport::from_ports).collect()
    }

    fn status(&self, now: i64) -> String {
        let since = |time: i64| human_duration(now.saturating_sub(time));
        match state(self.known) {
            "running" => format!("Up {}", since(self.started_at())),
            "restarting" => {
                let (code, finished) =
                    self.known.delay().map_or((-1, now), |it| (it.code, it.finished));
                format!("Restarting ({code}) {} ago", since(finished))
            }
            "exited" => {
                let code = self.known.code().unwrap_or(-1);
                format!("Exited ({code}) {} ago", since(self.exited_at()))
            }
            other => {
                let mut word = other.to_owned();
                if let Some(first) = word.get_mut(..1) {
                    first.make_ascii_uppercase();
                }
                word
            }
        }
    }
}
