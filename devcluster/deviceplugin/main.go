// SPDX-FileCopyrightText: The GPUMonitor authors
// SPDX-License-Identifier: Apache-2.0

// A device plugin that advertises simulated GPUs as nvidia.com/gpu and hands them out as NVIDIA's plugin does.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const (
	resource = "nvidia.com/gpu"
	endpoint = "gpumonitor-devcluster.sock"
	// Where NVIDIA's runtime looks when it takes the list of GPUs from mounts instead of the environment.
	mountList = "/var/run/nvidia-container-devices/"
	look      = time.Second
)

// uuid is that of the simulated GPU of an index; the simulated NVML library computes the same.
func uuid(index int) string {
	return fmt.Sprintf("GPU-%08x-5eed-4a00-8000-%012x", index, index)
}

type plugin struct {
	api.UnimplementedDevicePluginServer
	ids  []string
	stop chan struct{}
}

func (p *plugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{GetPreferredAllocationAvailable: true}, nil
}

func (p *plugin) ListAndWatch(_ *api.Empty, stream grpc.ServerStreamingServer[api.ListAndWatchResponse]) error {
	devices := make([]*api.Device, 0, len(p.ids))
	for _, id := range p.ids {
		devices = append(devices, &api.Device{ID: id, Health: api.Healthy})
	}
	if err := stream.Send(&api.ListAndWatchResponse{Devices: devices}); err != nil {
		return err
	}
	select {
	case <-p.stop:
	case <-stream.Context().Done():
	}
	return nil
}

// GetPreferredAllocation prefers low indices, so that what a test gets is the same each time.
func (p *plugin) GetPreferredAllocation(_ context.Context, request *api.PreferredAllocationRequest) (*api.PreferredAllocationResponse, error) {
	response := &api.PreferredAllocationResponse{}
	for _, container := range request.ContainerRequests {
		chosen := slices.Clone(container.MustIncludeDeviceIDs)
		available := slices.Clone(container.AvailableDeviceIDs)
		slices.Sort(available)
		for _, id := range available {
			if len(chosen) < int(container.AllocationSize) && !slices.Contains(chosen, id) {
				chosen = append(chosen, id)
			}
		}
		response.ContainerResponses = append(response.ContainerResponses, &api.ContainerPreferredAllocationResponse{DeviceIDs: chosen})
	}
	return response, nil
}

// Allocate names the GPUs both in the environment and by mounts, so that either of the runtime's strategies finds them.
func (p *plugin) Allocate(_ context.Context, request *api.AllocateRequest) (*api.AllocateResponse, error) {
	response := &api.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		ids := slices.Clone(container.DevicesIds)
		slices.Sort(ids)
		answer := &api.ContainerAllocateResponse{Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": strings.Join(ids, ",")}}
		for _, id := range ids {
			answer.Mounts = append(answer.Mounts, &api.Mount{HostPath: "/dev/null", ContainerPath: mountList + id, ReadOnly: true})
		}
		log.Printf("allocated %s", strings.Join(ids, ","))
		response.ContainerResponses = append(response.ContainerResponses, answer)
	}
	return response, nil
}

// serve answers the kubelet until the kubelet restarts (it then deletes all plugin sockets) or the context ends.
func serve(ctx context.Context, ids []string) error {
	socket := filepath.Join(api.DevicePluginPath, endpoint)
	if err := os.Remove(socket); err != nil && !os.IsNotExist(err) {
		return err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	kubelet, err := os.Stat(api.KubeletSocket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	p := &plugin{ids: ids, stop: make(chan struct{})}
	api.RegisterDevicePluginServer(server, p)
	go func() { _ = server.Serve(listener) }()
	defer server.Stop()
	defer close(p.stop)
	if err := register(ctx); err != nil {
		return err
	}
	log.Printf("registered %d GPUs", len(ids))
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(look):
		}
		now, err := os.Stat(api.KubeletSocket)
		if err != nil || !os.SameFile(now, kubelet) || !now.ModTime().Equal(kubelet.ModTime()) {
			return fmt.Errorf("the kubelet restarted")
		}
		if _, err := os.Stat(socket); err != nil {
			return fmt.Errorf("our socket is gone: %w", err)
		}
	}
}

func register(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	connection, err := grpc.NewClient("unix://"+api.KubeletSocket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	_, err = api.NewRegistrationClient(connection).Register(ctx, &api.RegisterRequest{
		Version:      api.Version,
		Endpoint:     endpoint,
		ResourceName: resource,
		Options:      &api.DevicePluginOptions{GetPreferredAllocationAvailable: true},
	})
	return err
}

func main() {
	gpus := flag.Int("gpus", 8, "number of simulated GPUs")
	flag.Parse()
	ids := make([]string, 0, *gpus)
	for index := range *gpus {
		ids = append(ids, uuid(index))
	}
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer cancel()
	for ctx.Err() == nil {
		if err := serve(ctx, ids); err != nil {
			log.Print(err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(look):
		}
	}
}
