//! Execution defaults of an OCI image: the `config` object of its configuration.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::IgnoredAny;

/// The execution defaults of an image. Source: OCI image-spec 1.1, `config.md`, "Properties"; Docker's format is the
/// same.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct ImageConfig {
    /// `NAME=VALUE`, in order.
    #[serde(deserialize_with = "null_is_default")]
    pub env: Vec<String>,
    /// `user`, `uid`, `user:group`, `uid:gid`, or empty for root.
    pub user: String,
    /// Directory in which the command starts; empty for `/`.
    pub working_dir: String,
    /// Precedes the command, which is the image's or the caller's.
    #[serde(deserialize_with = "null_is_default")]
    pub entrypoint: Vec<String>,
    /// Command if the caller gives none.
    #[serde(deserialize_with = "null_is_default")]
    pub cmd: Vec<String>,
    /// Signal that asks the program to end, as a name or a number; empty for `SIGTERM`.
    #[serde(deserialize_with = "null_is_default")]
    pub stop_signal: String,
    #[serde(deserialize_with = "null_is_default")]
    pub labels: BTreeMap<String, String>,
    /// Paths of directories whose files outlive changes of the image.
    #[serde(deserialize_with = "null_is_default")]
    pub volumes: VolumePaths,
}

/// Paths in a container, as an image lists them: the keys of an object.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VolumePaths(pub Vec<String>);

impl<const N: usize> From<[String; N]> for VolumePaths {
    fn from(paths: [String; N]) -> Self {
        Self(paths.into())
    }
}

impl From<Vec<String>> for VolumePaths {
    fn from(paths: Vec<String>) -> Self {
        Self(paths)
    }
}

impl<'de> Deserialize<'de> for VolumePaths {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let paths = BTreeMap::<String, IgnoredAny>::deserialize(deserializer)?;
        Ok(Self(paths.into_keys().collect()))
    }
}

/// Converts `null` to the default, because Docker writes `null` for an empty list.
fn null_is_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// Error of a configuration that cannot be parsed.
#[derive(Debug, thiserror::Error)]
#[error("cannot read the configuration of the image")]
pub struct ConfigError(#[source] serde_json::Error);

impl ImageConfig {
    /// Parses the configuration blob that a manifest names. Without a `config` object, all fields have their
    /// defaults.
    pub fn from_json(blob: &[u8]) -> Result<Self, ConfigError> {
        #[derive(Deserialize)]
        struct Blob {
            #[serde(default)]
            config: Option<ImageConfig>,
        }
        let blob: Blob = serde_json::from_slice(blob).map_err(ConfigError)?;
        Ok(blob.config.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(blob: &str, expect: Result<ImageConfig, &str>) {
        let found = ImageConfig::from_json(blob.as_bytes());
        match (found, expect) {
            (Ok(found), Ok(expect)) => assert_eq!(found, expect, "{blob}"),
            (Err(error), Err(expect)) => {
                let cause = std::error::Error::source(&error).unwrap().to_string();
                assert!(cause.contains(expect), "{blob}: {cause}");
            }
            (found, expect) => panic!("{blob}: {found:?}, not {expect:?}"),
        }
    }

    #[test]
    fn reads_what_builders_write() {
        check("{}", Ok(ImageConfig::default()));
        check(r#"{"config":null}"#, Ok(ImageConfig::default()));
        let nulls = r#"{"config":{"Env":null,"Cmd":null,"Labels":null,"Volumes":null}}"#;
        check(nulls, Ok(ImageConfig::default()));
        check(
            r#"{"architecture":"amd64","config":{"Env":["A=b"],"User":"1:2","WorkingDir":"/w",
               "Entrypoint":["e"],"Cmd":["c","d"],"Labels":{"k":"v"},"StopSignal":"SIGQUIT",
               "ExposedPorts":{"80/tcp":{}},"Volumes":{"/v":{}}}}"#,
            Ok(ImageConfig {
                env: vec!["A=b".to_owned()],
                user: "1:2".to_owned(),
                working_dir: "/w".to_owned(),
                entrypoint: vec!["e".to_owned()],
                cmd: vec!["c".to_owned(), "d".to_owned()],
                stop_signal: "SIGQUIT".to_owned(),
                labels: BTreeMap::from([("k".to_owned(), "v".to_owned())]),
                volumes: ["/v".to_owned()].into(),
            }),
        );
        check("[", Err("EOF while parsing"));
        check(r#"{"config":{"Cmd":"ls"}}"#, Err("invalid type: string"));
        check(r#"{"config":{"Volumes":["/v"]}}"#, Err("invalid type: sequence"));
    }
}
