//! `--userns`: the ids of a container's users on the host.

use std::num::NonZeroU32;
use std::str::FromStr;

use anyhow::bail;
use container::bundle::userns::{IdMap, MapError, SIZE, parse_ranges};
use container::plan::IdsChoice;
use kernel::process::IdRange;

use super::Ids;

/// A value of `--userns`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum UserNs {
    /// `host`: the same ids.
    Host,
    /// `auto[,size=COUNT]`: ids that no other container uses.
    Auto(NonZeroU32),
    /// A map, for users and groups alike.
    Map(Ranges),
}

/// A map of user ids or group ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ranges(Vec<IdRange>);

/// Parses a value of `--uidmap` or `--gidmap`.
pub(crate) fn ranges(text: &str) -> Result<Ranges, MapError> {
    parse_ranges(text).map(Ranges)
}

impl FromStr for UserNs {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("auto") {
            Some("") => return Ok(Self::Auto(SIZE)),
            Some(rest) => {
                let wrong = || {
                    format!(
                        "\"{text}\": auto takes size=COUNT, the number of ids, for example \
                        auto,size=65536"
                    )
                };
                let size = rest.strip_prefix(",size=").ok_or_else(wrong)?;
                return size.parse().map(Self::Auto).map_err(|_error| wrong());
            }
            None if text == "host" => return Ok(Self::Host),
            None => {}
        }
        if text.starts_with("keep-id") {
            return Err(
                "keep-id is not supported: root in the container of a user has the user's own ids, so leave this out, \
                or add U to a volume for a program with another user"
                    .to_owned(),
            );
        }
        ranges(text).map(Self::Map).map_err(|error| {
            if text.starts_with(|it: char| it.is_ascii_digit()) {
                return error.to_string();
            }
            "use host, auto[,size=COUNT] or CONTAINER:HOST:SIZE[,CONTAINER:HOST:SIZE…]".to_owned()
        })
    }
}

impl UserNs {
    /// Returns the map of ids, for callers that cannot reserve a range; fails for `auto`.
    pub(crate) fn fixed(&self) -> anyhow::Result<Option<IdMap>> {
        match self {
            Self::Host => Ok(None),
            Self::Map(Ranges(ranges)) => Ok(Some(IdMap::new(ranges.clone(), ranges.clone()))),
            Self::Auto(_) => bail!(
                "--userns auto works only with `run`, whose container reserves its ids while it \
                exists: give a map, for example 0:100000:65536"
            ),
        }
    }
}

impl Ids {
    /// Returns the map of ids that the options ask for; fails for `auto`.
    pub(crate) fn fixed(&self) -> anyhow::Result<Option<IdMap>> {
        let ranges = |map: &Option<Ranges>| map.clone().map(|Ranges(it)| it);
        match (&self.userns, ranges(&self.uidmap), ranges(&self.gidmap)) {
            (Some(wish), ..) => wish.fixed(),
            (None, None, None) => Ok(None),
            (None, Some(users), Some(groups)) => Ok(Some(IdMap::new(users, groups))),
            (None, Some(both), None) | (None, None, Some(both)) => {
                Ok(Some(IdMap::new(both.clone(), both)))
            }
        }
    }

    /// Returns the ids that the options ask for.
    pub(crate) fn wish(&self) -> anyhow::Result<IdsChoice> {
        if let Some(UserNs::Auto(size)) = self.userns {
            return Ok(IdsChoice::Auto(size));
        }
        Ok(self.fixed()?.map_or(IdsChoice::Host, IdsChoice::Map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_users_can_be() {
        let size = |size| UserNs::Auto(NonZeroU32::new(size).unwrap());
        let map = UserNs::Map(Ranges(vec![IdRange { inside: 0, outside: 9, count: 2 }]));
        let cases = [
            ("host", UserNs::Host),
            ("auto", size(65_536)),
            ("auto,size=9", size(9)),
            ("0:9:2", map),
        ];
        for (text, expect) in cases {
            assert_eq!(text.parse(), Ok(expect), "{text}");
        }
        let bad = [
            ("", "use host, auto"),
            ("keep-id", "has the user's own ids"),
            ("keep-id:uid=1000,gid=1000", "add U to a volume"),
            ("nomap", "use host, auto"),
            ("auto,", "auto takes size=COUNT"),
            ("auto,size=0", "auto takes size=COUNT"),
            ("auto,size=4294967296", "auto takes size=COUNT"),
            ("auto:uidmapping=1", "auto takes size=COUNT"),
            ("0:9:0", "is empty"),
            ("0:9", "is not a range of ids"),
        ];
        for (text, expect) in bad {
            let error = text.parse::<UserNs>().unwrap_err();
            assert!(error.contains(expect), "{text}: {error}");
        }
    }
}
