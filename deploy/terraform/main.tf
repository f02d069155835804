# A small Hetzner server for the control plane, a private network for the machines, and firewalls.
# It creates no worker: Windlass does. Costs: one cx23, one IPv4 address.
#   export HCLOUD_TOKEN=…
#   terraform init && terraform apply -var ssh_key="$(cat ~/.ssh/id_ed25519.pub)" -var admin_address=203.0.113.7/32
terraform {
  required_version = ">= 1.5"
  required_providers {
    hcloud = {
      source  = "hetznercloud/hcloud"
      version = "~> 1.50"
    }
  }
}

provider "hcloud" {}

variable "ssh_key" {
  description = "Public key that may log in to the control plane."
  type        = string
}

variable "admin_address" {
  description = "Network that may use SSH."
  type        = string
}

variable "location" {
  type    = string
  default = "nbg1"
}

resource "hcloud_ssh_key" "admin" {
  name       = "windlass-admin"
  public_key = var.ssh_key
}

resource "hcloud_network" "windlass" {
  name     = "windlass"
  ip_range = "10.0.0.0/16"
}

resource "hcloud_network_subnet" "machines" {
  network_id   = hcloud_network.windlass.id
  type         = "cloud"
  network_zone = "eu-central"
  ip_range     = "10.0.0.0/16"
}

# Dashboard, API and workers over HTTPS; port 80 for the certificate.
resource "hcloud_firewall" "control_plane" {
  name = "windlass-control-plane"

  rule {
    direction  = "in"
    protocol   = "tcp"
    port       = "22"
    source_ips = [var.admin_address]
  }

  rule {
    direction  = "in"
    protocol   = "tcp"
    port       = "80"
    source_ips = ["0.0.0.0/0", "::/0"]
  }

  rule {
    direction  = "in"
    protocol   = "tcp"
    port       = "443"
    source_ips = ["0.0.0.0/0", "::/0"]
  }
}

# Machines need no open port: they call the control plane. Set its id as firewall_ids of the fleet.
resource "hcloud_firewall" "machines" {
  name = "windlass-machines"
}

resource "hcloud_server" "control_plane" {
  name         = "windlass"
  server_type  = "cx23"
  image        = "debian-12"
  location     = var.location
  ssh_keys     = [hcloud_ssh_key.admin.id]
  firewall_ids = [hcloud_firewall.control_plane.id]
  backups      = true

  network {
    network_id = hcloud_network.windlass.id
    ip         = "10.0.0.2"
  }

  user_data = file("${path.module}/cloud-init.yaml")

  depends_on = [hcloud_network_subnet.machines]
}

output "address" {
  description = "Point the name of the control plane here."
  value       = hcloud_server.control_plane.ipv4_address
}

output "network_id" {
  description = "HETZNER_NETWORK_ID of the control plane."
  value       = hcloud_network.windlass.id
}

output "machine_firewall_id" {
  value = hcloud_firewall.machines.id
}
