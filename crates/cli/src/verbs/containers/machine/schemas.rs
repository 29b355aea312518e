//! Compares the configurations of `bundle --vm` with the API descriptions of Firecracker and Cloud Hypervisor in
//! `testdata/hypervisors`.

use serde_json::{Value, json};

use super::disks::Parts;
use super::disks::tests::{disks, parts};
use super::hypervisors::{cloud_hypervisor, firecracker};

const FIRECRACKER: &str = include_str!("../../../../../../testdata/hypervisors/firecracker.json");
const CLOUD_HYPERVISOR: &str =
    include_str!("../../../../../../testdata/hypervisors/cloud-hypervisor.json");

/// The definitions of an API.
struct Definitions(Value);

impl Definitions {
    fn new(text: &str) -> Self {
        Self(serde_json::from_str::<Value>(text).unwrap()["definitions"].take())
    }

    /// Checks a value of a definition. Fields that the definition lacks are refused.
    fn check(&self, name: &str, value: &Value) -> Result<(), String> {
        match self.0.get(name) {
            Some(definition) => self.check_at(name, definition, value),
            None => Err(format!("{name} is not among the definitions")),
        }
    }

    fn check_at(&self, at: &str, definition: &Value, value: &Value) -> Result<(), String> {
        if let Some(name) = definition["$ref"].as_str() {
            return self.check(name, value).map_err(|error| format!("{at}: {error}"));
        }
        if let Some(all) = definition["enum"].as_array()
            && !all.contains(value)
        {
            return Err(format!("{at}: {value} is not among the values"));
        }
        let (kind, fields) = (definition["type"].as_str(), definition["properties"].as_object());
        match (kind, value, fields) {
            (Some("string"), Value::String(_), _)
            | (Some("boolean"), Value::Bool(_), _)
            | (Some("integer"), Value::Number(_), _) => Ok(()),
            (Some("array"), Value::Array(parts), _) => {
                parts.iter().try_for_each(|it| self.check_at(at, &definition["items"], it))
            }
            (Some("object"), Value::Object(object), Some(fields)) => {
                let required = definition["required"].as_array().into_iter().flatten();
                let mut required = required.map(|it| it.as_str().unwrap());
                if let Some(name) = required.find(|it| !object.contains_key(*it)) {
                    return Err(format!("{at}.{name} is missing"));
                }
                object.iter().try_for_each(|(name, it)| {
                    let at = format!("{at}.{name}");
                    let field = fields.get(name).ok_or_else(|| format!("{at} is no field"))?;
                    self.check_at(&at, field, it)
                })
            }
            _ => Err(format!("{at}: {value} has another type than {kind:?}")),
        }
    }
}

/// Returns Firecracker's configuration with the parts that a user adds.
fn firecracker_with(parts: &Parts<'_>) -> Value {
    let mut all = serde_json::to_value(firecracker(parts)).unwrap();
    all["boot-source"] =
        json!({ "kernel_image_path": "vmlinux", "boot_args": parts.command_line() });
    all
}

/// Returns Cloud Hypervisor's configuration with the parts that a user adds.
fn cloud_hypervisor_with(parts: &Parts<'_>) -> Value {
    let mut all = serde_json::to_value(cloud_hypervisor(parts)).unwrap();
    all["payload"] = json!({ "kernel": "vmlinux", "cmdline": parts.command_line() });
    all
}

#[test]
fn the_apis_have_all_fields_of_the_configurations() {
    for number in [1, 3] {
        let disks = disks(number);
        for writable in [None, Some(16 << 20)] {
            let parts = Parts { writable, ..parts(&disks) };
            let count = number + usize::from(writable.is_some());
            let told = firecracker_with(&parts);
            assert_eq!(told["drives"].as_array().unwrap().len(), count);
            let checked = Definitions::new(FIRECRACKER).check("FullVmConfiguration", &told);
            assert_eq!(checked, Ok(()));
            // The description lets these out for other kinds of drives.
            for drive in told["drives"].as_array().unwrap() {
                assert!(drive["path_on_host"].is_string() && drive["is_read_only"].is_boolean());
            }
            let told = cloud_hypervisor_with(&parts);
            assert_eq!(told["disks"].as_array().unwrap().len(), count);
            assert_eq!(Definitions::new(CLOUD_HYPERVISOR).check("VmConfig", &told), Ok(()));
        }
    }
}

#[test]
fn fields_and_values_that_the_apis_lack_are_found() {
    let disks = disks(2);
    let parts = parts(&disks);
    let changed = |mut it: Value, path: &str, name: &str, value: Value| {
        it.pointer_mut(path).unwrap()[name] = value;
        it
    };
    let (drive, disk) = ("/drives/1", "/disks/1");
    for (path, name, value, expect) in [
        (drive, "read_only", json!(true), "Drive.read_only is no field"),
        (drive, "cache_type", json!("writeback"), "\"writeback\" is not among the values"),
        (drive, "is_read_only", json!("on"), "Drive.is_read_only: \"on\" has another type"),
        (drive, "rate_limiter", json!({}), "RateLimiter is not among the definitions"),
        ("/boot-source", "cmdline", json!(""), "BootSource.cmdline is no field"),
    ] {
        let told = changed(firecracker_with(&parts), path, name, value);
        let error = Definitions::new(FIRECRACKER).check("FullVmConfiguration", &told).unwrap_err();
        assert!(error.contains(expect), "{name}: {error}");
    }
    for (path, name, value, expect) in [
        (disk, "read_only", json!(true), "DiskConfig.read_only is no field"),
        (disk, "image_type", json!("raw"), "\"raw\" is not among the values"),
        (disk, "path", json!(1), "DiskConfig.path: 1 has another type"),
    ] {
        let told = changed(cloud_hypervisor_with(&parts), path, name, value);
        let error = Definitions::new(CLOUD_HYPERVISOR).check("VmConfig", &told).unwrap_err();
        assert!(error.contains(expect), "{name}: {error}");
    }
    let mut told = firecracker_with(&parts);
    told["drives"][0].as_object_mut().unwrap().remove("is_root_device");
    let error = Definitions::new(FIRECRACKER).check("FullVmConfiguration", &told).unwrap_err();
    assert!(error.ends_with("Drive.is_root_device is missing"), "{error}");
}
